"""The codec that stores rows as they came; sinks, windows and the baseline use it."""

from typing import ClassVar

import mlx.core as mx

from veloxquant.kernels.native import PLAIN, NativeRun
from veloxquant.quantizers.base import Packed, Shared, TokenAxis
from veloxquant.quantizers.specs.plain import PlainSpec


class PlainCodec(Shared):
    """Rows (B, H, T, D) in the type they arrived in."""

    axes: ClassVar = {"x": TokenAxis(2)}

    def __init__(self, dim: int, spec: PlainSpec | None = None) -> None:
        self.spec = spec or PlainSpec()
        self.dim = dim

    def encode(self, x: mx.array) -> Packed:
        """Keep the rows."""
        return {"x": x}

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ in the query's type."""
        return q @ packed["x"].astype(q.dtype).swapaxes(-1, -2)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V in the weights' type."""
        return w @ packed["x"].astype(w.dtype)

    def native(self, packed: Packed, start: int, stop: int) -> NativeRun:
        """How the compiled kernel reads these rows."""
        return NativeRun(PLAIN, packed["x"], start, stop, self.dim)

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """The rows in `dtype`."""
        return packed["x"].astype(dtype)
