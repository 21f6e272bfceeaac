"""Tokens of which only the channels that vary most are stored, the others being their mean.

Channels are ordered once by falling variance; a format keeps a prefix of that order. Keys of models
with rotary positions keep pairs (d, d + D/2) together, so that what is left is a rotated vector.
Source: none; a design of this library for `amc`.
"""

import mlx.core as mx

from veloxquant.kernels.native import PLAIN, NativeRun
from veloxquant.quantizers.affine import AffineTokenCodec
from veloxquant.quantizers.base import NativeParts, Packed, Shared, is_order
from veloxquant.quantizers.finite import in_the_middle
from veloxquant.quantizers.saliency import rank
from veloxquant.quantizers.specs.tiered import PrefixTokenSpec


def variance_order(x: mx.array, *, pairs: bool) -> mx.array:
    """Channels of (..., n, D) by falling variance over n, as (..., 1, D) uint16.

    Args:
        x: rows.
        pairs: rank d and d + D/2 by their sum and put them side by side; D must be even, or
            channels are ranked alone.
    """
    dim = x.shape[-1]
    spread = x.astype(mx.float32).var(axis=-2, keepdims=True)
    pairs = pairs and dim % 2 == 0
    if pairs:
        spread = spread[..., : dim // 2] + spread[..., dim // 2 :]
    order = mx.argsort(rank(spread), axis=-1)
    if pairs:
        order = mx.stack([order, order + dim // 2], axis=-1).reshape(*order.shape[:-1], dim)
    return order.astype(mx.uint16)


class _Prefix:
    """The basis of the kept channels, in their order."""

    def __init__(self, codec: "PrefixTokenCodec", packed: Packed) -> None:
        self.codec, self.order = codec, packed["p"]

    def rotate_query(self, q: mx.array) -> mx.array:
        """The kept channels of queries."""
        return mx.take_along_axis(q, self.order, axis=-1)[..., : self.codec.kept]

    def unrotate(self, x: mx.array) -> mx.array:
        """Sums of kept channels at their place, 0 elsewhere."""
        wide = mx.pad(x, [(0, 0)] * 3 + [(0, self.codec.dim - self.codec.kept)])
        return mx.take_along_axis(wide, mx.argsort(self.order, axis=-1), axis=-1)


class _Dropped:
    """One channel that stands for the means of the dropped ones."""

    def __init__(self, codec: "PrefixTokenCodec", packed: Packed) -> None:
        self.means = codec.dropped_means(packed, mx.float32)

    def rotate_query(self, q: mx.array) -> mx.array:
        """Products of queries with the means, (B, H, M, 1)."""
        return (q * self.means.astype(q.dtype)).sum(axis=-1, keepdims=True)

    def unrotate(self, x: mx.array) -> mx.array:
        """Sums of weights times the means."""
        return x * self.means.astype(x.dtype)


class PrefixTokenCodec(Shared):
    """`w`, `s`, `b` of the kept channels; constants `p`, the order, and `c`, all means in place.

    Constants are (B, H, 1, D), `p` uint16.
    """

    def __init__(self, dim: int, spec: PrefixTokenSpec) -> None:
        self.dim, self.spec = dim, spec
        self.kept = spec.kept(dim)
        self.rows = AffineTokenCodec(self.kept, spec.affine())
        self.axes = self.rows.axes
        self.limits = {"p": dim}

    # ---- coding -------------------------------------------------------------------------

    def fit(self, x: mx.array) -> Packed:
        """Order and means of channels."""
        rows = in_the_middle(x.astype(mx.float32), 2)
        mean = rows.mean(axis=2, keepdims=True)
        return {"p": variance_order(rows, pairs=self.spec.pairs), "c": mean.astype(x.dtype)}

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) with constants of its own, which are part of the result."""
        fitted = self.fit(x)
        return self.encode_fitted(x, fitted) | fitted

    def encode_fitted(self, x: mx.array, fitted: Packed) -> Packed:
        """Pack (B, H, n, D), every token alone."""
        return self.rows.encode(mx.contiguous(self._first(x, fitted)))

    def fault(self, packed: Packed) -> str | None:
        """An order that is none."""
        return None if is_order(packed["p"]) else "array 'p' is damaged: it is no order"

    def _first(self, x: mx.array, packed: Packed) -> mx.array:
        return mx.take_along_axis(x, packed["p"], axis=-1)[..., : self.kept]

    def dropped_means(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Means of the dropped channels in their place, 0 for the kept ones: (B, H, 1, D)."""
        place = mx.argsort(packed["p"], axis=-1)
        return mx.where(place >= self.kept, packed["c"].astype(dtype), 0)

    def _placed(self, x: mx.array, packed: Packed) -> mx.array:
        """Kept channels (B, H, n, kept) in their place, 0 elsewhere."""
        if self.kept < self.dim:
            x = mx.pad(x, [(0, 0)] * 3 + [(0, self.dim - self.kept)])
        return mx.take_along_axis(x, mx.argsort(packed["p"], axis=-1), axis=-1)

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        rows = self._placed(self.rows.decode(packed, dtype), packed)
        return rows if self.kept == self.dim else rows + self.dropped_means(packed, dtype)

    # ---- products -----------------------------------------------------------------------

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ; the means add the same to every token."""
        out = self.rows.scores(self._first(q, packed), packed)
        if self.kept == self.dim:
            return out
        return out + (q * self.dropped_means(packed, q.dtype)).sum(axis=-1, keepdims=True)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V."""
        out = self._placed(self.rows.mix(w, packed), packed)
        if self.kept == self.dim:
            return out
        return out + w.sum(axis=-1, keepdims=True) * self.dropped_means(packed, w.dtype)

    def native(self, packed: Packed, start: int, stop: int) -> NativeParts:
        """How the compiled kernel reads these rows: kept channels, and one for all the others."""
        run = self.rows.native(packed, start, stop)
        run = run._replace(basis=_Prefix(self, packed), dim=self.kept)
        if self.kept == self.dim:
            return run
        ones = mx.broadcast_to(mx.ones((1, 1, 1, 1)), (*packed["w"].shape[:3], 1))
        mean = NativeRun(PLAIN, ones, start, stop, 1, basis=_Dropped(self, packed), dim=1)
        return run, mean
