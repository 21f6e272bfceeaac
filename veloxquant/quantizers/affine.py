"""Affine groups in MLX's own layout, along channels (per token) or along tokens (per channel).

`w ≈ scale·code + bias`. Stock `quantized_matmul` reads both directions: a per-channel block is the
same format on the transposed matrix. Encoders: at 1 bit mean ± mean deviation (loses 0.36 of the
variance, min/max 1.96); at 2 bits `mx.quantize`, whose shifted grid has the smaller error there
(unit Gaussian, group 32: 0.132 against 0.154); from 3 bits on min/max.
Source: KIVI (arXiv 2402.02750), section 3.
"""

import mlx.core as mx

from veloxquant.dsa.mlx_pack import pack
from veloxquant.kernels import encode
from veloxquant.kernels.native import AFFINE_CHANNEL, AFFINE_TOKEN, NativeRun
from veloxquant.quantizers.base import Packed, Shared, TokenAxis, saturated
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec

_MLX_ENCODER_BITS = 2
_TINY = 1e-30
_LIFT = float(1 << 24)
"""`mx.quantize` makes no step below 1e-7, whatever the rows are; a power of two rounds nothing."""


NORMAL = 2.0**-14
"""Least step that fp16 rounds as finely as larger ones."""
_UNIT = 2.0**-24


def stored_step(step: mx.array, dtype: mx.Dtype) -> mx.array:
    """fp32 steps in the type of scales; those that fp16 can hardly tell from zero are rounded up.

    Rounded down, or to nothing, a grid would end far below its largest entry.
    """
    if dtype == mx.float16:
        step = mx.where(step < NORMAL, mx.ceil(step / _UNIT) * _UNIT, step)
    return step.astype(dtype)


def is_coarse(scale: mx.array) -> mx.array:
    """Where fp16 steps (..., groups) are so small that rounding matters."""
    return scale < NORMAL


def affine_encode(
    x: mx.array, bits: int, group: int, dtype: mx.Dtype, *, minmax: bool = False
) -> Packed:
    """Quantize groups of the last axis.

    Args:
        x: (..., n) any float type, n a multiple of `group`.
        bits: 1, 2, 3, 4, 5, 6 or 8.
        group: 32, 64 or 128.
        dtype: type of scales and biases.
        minmax: at 2 bits, a grid from minimum to maximum instead of MLX's.

    Returns:
        `w` (..., n·bits/32) uint32, `s` and `b` (..., n/group).
    """
    x = x.astype(mx.float32)
    if bits == _MLX_ENCODER_BITS and not minmax:
        w, s, b = mx.quantize(x * _LIFT, group_size=group, bits=bits)
        return {"w": w, "s": (s / _LIFT).astype(dtype), "b": (b / _LIFT).astype(dtype)}
    *lead, n = x.shape
    groups = x.reshape(*lead, n // group, group)
    if bits == 1:
        mean = groups.mean(axis=-1, keepdims=True)
        spread = mx.abs(groups - mean).mean(axis=-1, keepdims=True)
        low, high = mean - spread, mean + spread
    else:
        low = groups.min(axis=-1, keepdims=True)
        high = groups.max(axis=-1, keepdims=True)
    top = (1 << bits) - 1
    # The codes are chosen for the stored, rounded grid, or 16-bit scales would shift every value.
    b = low.astype(dtype)
    s = stored_step((high - low) / top, dtype)
    step = s.astype(mx.float32)
    inverse = mx.where(step > 0, 1 / mx.maximum(step, _TINY), 0.0)
    codes = mx.clip(mx.round((groups - b.astype(mx.float32)) * inverse), 0, top)
    return {
        "w": pack(codes.reshape(*lead, n), bits),
        "s": s.squeeze(-1),
        "b": b.squeeze(-1),
    }


def _with_small_steps(
    packed: Packed, x: mx.array, bits: int, group: int, *, minmax: bool = False
) -> Packed:
    """What the compiled encoder gave for groups of the last axis, small fp16 steps rounded up."""
    scale = packed["s"]
    if scale.dtype != mx.float16 or not (coarse := is_coarse(scale)).any().item():
        return packed
    # Group by group: codes of the others must not depend on what came with them.
    other = affine_encode(x, bits, group, scale.dtype, minmax=minmax)
    words = mx.repeat(coarse, group * bits // 32, axis=-1)
    return {n: mx.where(words if n == "w" else coarse, other[n], a) for n, a in packed.items()}


def affine_decode(packed: Packed, bits: int, group: int, dtype: mx.Dtype) -> mx.array:
    """Inverse of `affine_encode` in `dtype`; scales are widened first, so nothing rounds twice.

    In fp32 where fp16 is asked for: a code times its scale may go over 65504 although the row,
    once the minimum is added, does not.
    """
    wide = mx.float32 if dtype == mx.float16 else dtype
    scales, biases = packed["s"].astype(wide), packed["b"].astype(wide)
    rows = mx.dequantize(packed["w"], scales, biases, group_size=group, bits=bits)
    return saturated(rows, dtype)


def _pad_last(x: mx.array, size: int) -> mx.array:
    """Widen the last axis by repeating its last element, which leaves group extremes alone."""
    missing = size - x.shape[-1]
    if missing == 0:
        return x
    return mx.concatenate([x, mx.repeat(x[..., -1:], missing, axis=-1)], axis=-1)


def _pad_zero(x: mx.array, size: int) -> mx.array:
    missing = size - x.shape[-1]
    return x if missing == 0 else mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


class AffineTokenCodec(Shared):
    """Groups of channels of each token: `w` (B, H, T, D·bits/32), `s`, `b` (B, H, T, D/group)."""

    def __init__(self, dim: int, spec: AffineTokenSpec) -> None:
        self.dim, self.spec = dim, spec
        self.width = spec.padded(dim)
        self.axes = {name: TokenAxis(2) for name in ("w", "s", "b")}

    def encode(self, x: mx.array, dtype: mx.Dtype | None = None) -> Packed:
        """Pack (B, H, n, D) for any n; every token alone. Scales in `dtype`, else as `x`."""
        dtype = dtype or x.dtype
        bits, group, minmax = self.spec.bits, self.spec.group, self.spec.minmax
        padded, packed = _pad_last(x, self.width), None
        if bits != _MLX_ENCODER_BITS or minmax:
            packed = encode.affine(padded, bits, group, dtype, along_tokens=False)
        if packed is None:
            return affine_encode(padded, bits, group, dtype, minmax=minmax)
        return _with_small_steps(packed, padded, bits, group, minmax=minmax)

    def _matmul(self, x: mx.array, packed: Packed, *, transpose: bool) -> mx.array:
        return mx.quantized_matmul(
            x, packed["w"], packed["s"], packed["b"],
            transpose=transpose, group_size=self.spec.group, bits=self.spec.bits,
        )  # fmt: skip

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ from the packed rows."""
        return self._matmul(_pad_zero(q, self.width), packed, transpose=True)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V from the packed rows."""
        return self._matmul(w, packed, transpose=False)[..., : self.dim]

    def native(self, packed: Packed, start: int, stop: int) -> NativeRun:
        """How the compiled kernel reads these rows."""
        return NativeRun(
            AFFINE_TOKEN, packed["w"], start, stop, self.width, self.spec.bits, self.spec.group,
            scale=packed["s"], bias=packed["b"],
        )  # fmt: skip

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        return affine_decode(packed, self.spec.bits, self.spec.group, dtype)[..., : self.dim]


class AffineChannelCodec(Shared):
    """Groups of tokens of each channel: `w` (B, H, D, T·bits/32), `s`, `b` (B, H, D, T/group)."""

    def __init__(self, dim: int, spec: AffineChannelSpec) -> None:
        self.dim, self.spec = dim, spec
        self.axes = {
            "w": TokenAxis(3, spec.bits, 32),
            "s": TokenAxis(3, 1, spec.group),
            "b": TokenAxis(3, 1, spec.group),
        }

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D), n a multiple of the group."""
        bits, group, packed = self.spec.bits, self.spec.group, None
        if bits != _MLX_ENCODER_BITS:
            packed = encode.affine(x, bits, group, x.dtype, along_tokens=True)
        columns = x.swapaxes(-1, -2)
        if packed is None:
            return affine_encode(columns, bits, group, x.dtype)
        return _with_small_steps(packed, columns, bits, group)

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ: the packed matrix is Kᵀ already."""
        return mx.quantized_matmul(
            q, packed["w"], packed["s"], packed["b"],
            transpose=False, group_size=self.spec.group, bits=self.spec.bits,
        )  # fmt: skip

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V, for values stored per channel."""
        return mx.quantized_matmul(
            w, packed["w"], packed["s"], packed["b"],
            transpose=True, group_size=self.spec.group, bits=self.spec.bits,
        )  # fmt: skip

    def native(self, packed: Packed, start: int, stop: int) -> NativeRun:
        """How the compiled kernel reads these columns."""
        return NativeRun(
            AFFINE_CHANNEL, packed["w"], start, stop, self.dim, self.spec.bits, self.spec.group,
            scale=packed["s"], bias=packed["b"],
        )  # fmt: skip

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        return affine_decode(packed, self.spec.bits, self.spec.group, dtype).swapaxes(-1, -2)
