"""Affine groups along channels of rows that were divided by a factor a channel first.

One scale a token serves all channels once their ranges are alike: each channel is divided by the
root of its largest magnitude, and the sum of values is multiplied by it once at the end.
Source: ZipCache (arXiv 2405.14256), channel-separable token-wise quantization. Differs: factors are
fitted to the first tokens and stay, instead of coming with every chunk, so that one product serves
all chunks.
"""

import mlx.core as mx

from veloxquant.kernels.native import NativeRun
from veloxquant.quantizers.affine import NORMAL, AffineTokenCodec
from veloxquant.quantizers.base import FP16_MAX, Packed, Shared
from veloxquant.quantizers.specs.tiered import ScaledTokenSpec

_SPREAD = 64.0
"""Largest ratio of two factors: rows stay in the range of their type, whatever comes later."""
_ROOM = 128.0
"""Times that later rows may be as large as the first ones before factors must not be smaller."""
_TINY = 1e-30


def channel_factors(x: mx.array) -> mx.array:
    """Roots of the largest magnitude of each channel of (..., n, D), as (..., 1, D) fp32.

    Scaled so that none is below 1: dividing by them never makes a value larger. What is no number
    does not count.
    """
    size = mx.abs(x.astype(mx.float32))
    peak = mx.sqrt(mx.where(mx.isfinite(size), size, 0.0).max(axis=-2, keepdims=True))
    most = mx.maximum(peak.max(axis=-1, keepdims=True), _TINY)
    return mx.maximum(peak / most * _SPREAD, 1.0)


def small_rows(x: mx.array) -> mx.array:
    """A power of two (..., 1, 1), at most 1, for factors of fp16 rows (..., n, D): smaller ones.

    Divided by factors of up to 64, rows near the least numbers of the type would have no scales.
    """
    size = mx.abs(x.astype(mx.float32))
    peak = mx.where(mx.isfinite(size), size, 0.0).max(axis=(-1, -2), keepdims=True)
    shift = _ROOM * mx.power(2.0, mx.ceil(mx.log2(mx.maximum(peak, _TINY))))
    return mx.where(peak > 0, mx.clip(shift, NORMAL, 1.0), 1.0)


class ChannelScale:
    """The basis of rows that were divided by one factor a channel."""

    def __init__(self, factors: mx.array) -> None:
        self.factors = factors.astype(mx.float32)

    def rotate_query(self, q: mx.array) -> mx.array:
        """Queries for products with the divided rows."""
        return q * self.factors.astype(q.dtype)

    def unrotate(self, x: mx.array) -> mx.array:
        """Sums of divided rows as sums of rows."""
        return x * self.factors.astype(x.dtype)


class ScaledTokenCodec(Shared):
    """`w`, `s`, `b` as `AffineTokenCodec`, and the constant `c` (B, H, 1, D)."""

    def __init__(self, dim: int, spec: ScaledTokenSpec) -> None:
        self.dim, self.spec = dim, spec
        self.rows = AffineTokenCodec(dim, spec.affine(dim))
        self.axes = self.rows.axes

    def fit(self, x: mx.array) -> Packed:
        """Factors from the first tokens."""
        factors = channel_factors(x)
        if x.dtype == mx.float16:
            factors = factors * small_rows(x)
        return {"c": factors.astype(x.dtype)}

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) with factors of its own, which are part of the result."""
        fitted = self.fit(x)
        return self.encode_fitted(x, fitted) | fitted

    def encode_fitted(self, x: mx.array, fitted: Packed) -> Packed:
        """Pack (B, H, n, D), every token alone."""
        flat = x.astype(mx.float32) / fitted["c"].astype(mx.float32)
        if x.dtype == mx.float16:  # small factors make finite rows larger
            flat = mx.where(mx.isfinite(x), mx.clip(flat, -FP16_MAX, FP16_MAX), flat)
        return self.rows.encode(flat, x.dtype)

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ."""
        return self.rows.scores(q * packed["c"].astype(q.dtype), packed)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V."""
        return self.rows.mix(w, packed) * packed["c"].astype(w.dtype)

    def native(self, packed: Packed, start: int, stop: int) -> NativeRun:
        """How the compiled kernel reads these rows: sums come out divided."""
        run = self.rows.native(packed, start, stop)
        return run._replace(basis=ChannelScale(packed["c"]))

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        rows = self.rows.decode(packed, mx.float32) * packed["c"].astype(mx.float32)
        return rows.astype(dtype)
