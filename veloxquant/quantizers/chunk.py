"""Uniform integer codes as CacheGen makes them: by channel of a chunk, or by token.

A chunk's step is shared by all of its tokens, so differences of neighbouring codes stay small
integers: that is what entropy coding of a saved cache lives on (`quantizers/cachegen.py`).
Source: CacheGen (arXiv 2310.07240).
"""

import mlx.core as mx
import numpy as np

from veloxquant.dsa.mlx_pack import pack, unpack
from veloxquant.kernels.native import AFFINE_CHANNEL, AFFINE_TOKEN, NativeRun
from veloxquant.quantizers.affine import stored_step
from veloxquant.quantizers.base import FP16_MAX, Packed, Shared, TokenAxis
from veloxquant.quantizers.specs.coded import ChunkSpec, SymmetricSpec

_STOCK_GROUPS = (128, 64, 32)
_TINY = 1e-30


def _stock_group(size: int) -> int:
    """Largest group of MLX's affine format that divides `size`."""
    return next(group for group in _STOCK_GROUPS if size % group == 0)


def minmax_encode(x: mx.array, bits: int, size: int, dtype: mx.Dtype) -> Packed:
    """Codes on a grid from the least to the largest entry of groups of the last axis.

    Args:
        x: (..., n) fp32, n a multiple of `size`, which is a multiple of 32.
        bits: of a code.
        size: entries that share a grid.
        dtype: type of scales and minima.

    Returns:
        `w` (..., n·bits/32) uint32, `s` and `b` (..., n/size).
    """
    *lead, n = x.shape
    groups = x.reshape(*lead, n // size, size)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    top = (1 << bits) - 1
    b, s = low.astype(dtype), stored_step((high - low) / top, dtype)
    step = s.astype(mx.float32)
    inverse = mx.where(step > 0, 1 / mx.maximum(step, _TINY), 0.0)
    codes = mx.clip(mx.round((groups - b.astype(mx.float32)) * inverse), 0, top)
    return {"w": pack(codes.reshape(*lead, n), bits), "s": s.squeeze(-1), "b": b.squeeze(-1)}


class ChunkCodec(Shared):
    """`w` (B, H, D, T·bits/32), `s` and `b` (B, H, D, T/size): the transposed matrix."""

    def __init__(self, dim: int, spec: ChunkSpec) -> None:
        self.dim, self.spec = dim, spec
        scale = TokenAxis(3, 1, spec.size)
        self.axes = {"w": TokenAxis(3, spec.bits, 32), "s": scale, "b": scale}
        self._group = _stock_group(spec.size)

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D), n a multiple of the chunk."""
        columns = x.astype(mx.float32).swapaxes(-1, -2)
        return minmax_encode(columns, self.spec.bits, self.spec.size, x.dtype)

    def _stock(self, packed: Packed, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
        """Words with scales and minima repeated for the groups that MLX's products know."""
        times = self.spec.size // self._group
        scale, low = (mx.repeat(packed[n].astype(dtype), times, axis=-1) for n in ("s", "b"))
        return packed["w"], scale, low

    def codes(self, packed: Packed) -> mx.array:
        """Integer codes (B, H, D, T) uint32."""
        words = packed["w"]
        return unpack(words, self.spec.bits, words.shape[-1] * 32 // self.spec.bits)

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ: the packed matrix is Kᵀ already."""
        return mx.quantized_matmul(
            q, *self._stock(packed, q.dtype),
            transpose=False, group_size=self._group, bits=self.spec.bits,
        )  # fmt: skip

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V from the packed columns."""
        return mx.quantized_matmul(
            w, *self._stock(packed, w.dtype),
            transpose=True, group_size=self._group, bits=self.spec.bits,
        )  # fmt: skip

    def native(self, packed: Packed, start: int, stop: int) -> NativeRun:
        """Affine columns whose groups are whole chunks."""
        return NativeRun(
            AFFINE_CHANNEL, packed["w"], start, stop, self.dim, self.spec.bits, self.spec.size,
            scale=packed["s"], bias=packed["b"],
        )  # fmt: skip

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        rows = mx.dequantize(
            *self._stock(packed, mx.float32), group_size=self._group, bits=self.spec.bits
        )
        return rows.swapaxes(-1, -2).astype(dtype)


class SymmetricCodec(Shared):
    """`w` (B, H, T, D·bits/32), D in whole words, and `s` (B, H, T, 1): `x ≈ s·(code - middle)`."""

    def __init__(self, dim: int, spec: SymmetricSpec) -> None:
        self.dim, self.spec = dim, spec
        self.width = spec.padded(dim)
        self.middle = (1 << (spec.bits - 1)) - 1
        self.axes = {"w": TokenAxis(2), "s": TokenAxis(2)}
        self._group = _stock_group(self.width)
        # fp16 rounds the scale of its largest number up, and the least code would be infinite.
        self._most = float(np.nextafter(np.float16(FP16_MAX / self.middle), np.float16(0)))

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) for any n; every token alone."""
        dtype, x = x.dtype, x.astype(mx.float32)
        scale = mx.abs(x).max(axis=-1, keepdims=True) / self.middle
        scale = mx.minimum(scale, self._most) if dtype == mx.float16 else scale
        scale = stored_step(scale, dtype)
        step = scale.astype(mx.float32)
        inverse = mx.where(step > 0, 1 / mx.maximum(step, _TINY), 0.0)
        codes = mx.clip(mx.round(x * inverse), -self.middle, self.middle) + self.middle
        if self.width > self.dim:
            room = [(0, 0)] * 3 + [(0, self.width - self.dim)]
            codes = mx.pad(codes, room, constant_values=self.middle)
        return {"w": pack(codes, self.spec.bits), "s": scale}

    def codes(self, packed: Packed) -> mx.array:
        """Integer codes (B, H, T, D) uint32."""
        return unpack(packed["w"], self.spec.bits, self.width)[..., : self.dim]

    def _stock(self, packed: Packed, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
        scale = packed["s"].astype(dtype)
        scale = mx.broadcast_to(scale, (*scale.shape[:3], self.width // self._group))
        return packed["w"], scale, scale * -self.middle

    def _matmul(self, x: mx.array, packed: Packed, *, transpose: bool) -> mx.array:
        return mx.quantized_matmul(
            x, *self._stock(packed, x.dtype),
            transpose=transpose, group_size=self._group, bits=self.spec.bits,
        )  # fmt: skip

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ from the packed rows."""
        if self.width > self.dim:
            q = mx.pad(q, [(0, 0)] * 3 + [(0, self.width - self.dim)])
        return self._matmul(q, packed, transpose=True)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V from the packed rows."""
        return self._matmul(w, packed, transpose=False)[..., : self.dim]

    def native(self, packed: Packed, start: int, stop: int) -> NativeRun:
        """Affine rows of a single group."""
        scale = packed["s"]
        return NativeRun(
            AFFINE_TOKEN, packed["w"], start, stop, self.width, self.spec.bits, self.width,
            scale=scale, bias=scale * -self.middle,
        )  # fmt: skip

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        centred = self.codes(packed).astype(mx.float32) - self.middle
        return (centred * packed["s"].astype(mx.float32)).astype(dtype)
