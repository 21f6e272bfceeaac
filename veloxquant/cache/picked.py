"""Some tokens of a store, gathered for one step: what attention reads of a packed part."""

import mlx.core as mx

from veloxquant.cache.store import Store
from veloxquant.quantizers.base import NativeParts, Packed, saturated


class Picked:
    """Tokens of a token-local store at ascending indices (B, H, n), each head its own."""

    def __init__(self, store: Store, index: mx.array) -> None:
        start, _, _, arrays = store.live
        at = index[..., None] + start if start else index[..., None]
        self.codec = store.codec
        self.length = index.shape[-1]
        self._packed: Packed = {
            name: mx.take_along_axis(a, at, axis=2) if name in self.codec.axes else a
            for name, a in arrays.items()
        }

    def scores(self, q: mx.array) -> mx.array:
        """(B, H, M, D) to (B, H, M, n)."""
        return self.codec.scores(q, self._packed)

    def mix(self, w: mx.array) -> mx.array:
        """(B, H, M, n) to (B, H, M, D)."""
        return self.codec.mix(w, self._packed)

    def native(self) -> NativeParts | None:
        """The tokens for the compiled kernel; None if it lacks the form."""
        return self.codec.native(self._packed, 0, self.length)

    def decode(self, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, stop - start, D)."""
        part = {
            name: a[:, :, start:stop] if name in self.codec.axes else a
            for name, a in self._packed.items()
        }
        return saturated(self.codec.decode(part, dtype), dtype)
