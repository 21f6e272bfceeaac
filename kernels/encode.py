"""The compiled encoders: quantise and pack rows without leaving the CPU cache.

Each returns None where the array operations in `quantizers/` must do it: on a GPU, without the
extension, or for a shape the kernel does not take.
"""

from __future__ import annotations

import ctypes
import math

import mlx.core as mx
import numpy as np

from veloxquant.kernels import dispatch, native

_PTR = ctypes.c_void_p


class _Affine(ctypes.Structure):
    """Mirror of `vq_affine`."""

    _fields_ = [
        ("x", _PTR), ("outer", ctypes.c_int64), ("outer_batch", ctypes.c_int64),
        ("base_stride", ctypes.c_int64), ("row_stride", ctypes.c_int64), ("step", ctypes.c_int64),
        ("n", ctypes.c_int32), ("bits", ctypes.c_int32), ("group", ctypes.c_int32),
        ("type", ctypes.c_int32), ("words", _PTR), ("scale", _PTR), ("bias", _PTR),
        ("part", ctypes.c_int32), ("parts", ctypes.c_int32),
    ]  # fmt: skip


class _Rotated(ctypes.Structure):
    """Mirror of `vq_rotated`."""

    _fields_ = [
        ("x", _PTR), ("rows", ctypes.c_int64), ("dim", ctypes.c_int32), ("lanes", ctypes.c_int32),
        ("bits", ctypes.c_int32), ("unbiased", ctypes.c_int32), ("signs", _PTR),
        ("thresholds", _PTR), ("levels", _PTR), ("words", _PTR), ("norm", _PTR),
        ("part", ctypes.c_int32), ("parts", ctypes.c_int32),
    ]  # fmt: skip


_fits: dict[int, bool] = {}


def _library() -> ctypes.CDLL | None:
    if mx.default_device() != mx.cpu or (lib := native.library()) is None:
        return None
    if (fits := _fits.get(id(lib))) is None:
        sizes = ctypes.sizeof(_Affine) * 1000 + ctypes.sizeof(_Rotated)
        fits = _fits[id(lib)] = lib.vq_encode_abi() == sizes
    return lib if fits else None


def _rows(x: mx.array) -> np.ndarray:
    """The rows in fp32, contiguous, evaluated; shares memory with `x` where it can."""
    return np.ascontiguousarray(native.seen(x.astype(mx.float32)))


def affine(
    x: mx.array, bits: int, group: int, dtype: mx.Dtype, *, along_tokens: bool
) -> dict[str, mx.array] | None:
    """Affine groups of (B, H, n, D), along channels or along tokens.

    Args:
        x: rows; the axis that groups run along is a multiple of `group`.
        bits: 1 to 8.
        group: 32, 64 or 128.
        dtype: type of scales and minima.
        along_tokens: True packs the transposed matrix (B, H, D, n), as `AffineChannelCodec` stores.

    Returns:
        `w`, `s`, `b` as `quantizers.affine.affine_encode` gives them.
    """
    lib = _library()
    if lib is None or x.size == 0:
        return None
    rows = _rows(x)
    batch, heads, n, dim = rows.shape
    outer, width = (dim, n) if along_tokens else (n, dim)
    lead = (batch, heads, outer)
    words = np.empty((*lead, width * bits // 32), dtype=np.uint32)
    scale = np.empty((*lead, width // group), dtype=np.float32)
    bias = np.empty_like(scale)
    call = _Affine(
        x=native.address(rows), outer=batch * heads * outer, outer_batch=outer, base_stride=n * dim,
        row_stride=1 if along_tokens else dim, step=dim if along_tokens else 1, n=width,
        bits=bits, group=group, type=native.type_code(dtype), words=native.address(words),
        scale=native.address(scale), bias=native.address(bias),
    )  # fmt: skip
    if lib.vq_encode_affine(ctypes.byref(call), dispatch.threads(rows.size)):
        return None
    return {
        "w": mx.array(words),
        "s": mx.array(scale).astype(dtype),
        "b": mx.array(bias).astype(dtype),
    }


def rotated(
    x: mx.array,
    *,
    bits: int,
    unbiased: bool,
    signs: np.ndarray,
    thresholds: np.ndarray,
    levels: np.ndarray,
) -> tuple[mx.array, mx.array] | None:
    """Rotated codebook codes of (B, H, n, D), D a power of two.

    Args:
        x: rows.
        bits: 1 to 6.
        unbiased: which norm correction, see `CodebookSpec`.
        signs: (2, D) fp32 random signs of the two Hadamard rounds.
        thresholds: 2^bits - 1 fp32, ascending.
        levels: 2^bits fp32, unit variance.

    Returns:
        Words (B, H, n, D·bits/32) uint32 and norms (B, H, n, 1) fp32.
    """
    lib = _library()
    dim = x.shape[-1]
    if lib is None or x.size == 0 or dim & (dim - 1) or not 32 <= dim <= native.MAX_DIM:
        return None
    rows = _rows(x)
    lanes = math.ceil(dim / 32)
    words = np.empty((*rows.shape[:3], lanes * bits), dtype=np.uint32)
    norm = np.empty((*rows.shape[:3], 1), dtype=np.float32)
    call = _Rotated(
        x=native.address(rows), rows=rows.size // dim, dim=dim, lanes=lanes, bits=bits,
        unbiased=int(unbiased), signs=native.address(signs), thresholds=native.address(thresholds),
        levels=native.address(levels), words=native.address(words), norm=native.address(norm),
    )  # fmt: skip
    if lib.vq_encode_rotated(ctypes.byref(call), dispatch.threads(rows.size)):
        return None
    return mx.array(words), mx.array(norm)
