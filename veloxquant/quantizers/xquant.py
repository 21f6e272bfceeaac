"""Codes that layers share, as documented functions on plain arrays.

Source: XQuant (arXiv 2510.11236).
"""

from typing import NamedTuple

import mlx.core as mx

from veloxquant.quantizers.latent_functions import on_grid
from veloxquant.quantizers.shared_codes import least_squares


class GroupParams(NamedTuple):
    """Scales and minima (..., n_groups, 1, D), rows and bits of codes."""

    scale: mx.array
    zero: mx.array
    n_rows: int
    bits: int


def pair_layers(n_layers: int, group_size: int) -> list[tuple[str, int]]:
    """Part and group of every layer: the first of a group is its "anchor", the others "reuse"."""
    return [("reuse" if i % group_size else "anchor", i // group_size) for i in range(n_layers)]


def _grouped(x: mx.array, size: int) -> mx.array:
    """Rows (..., N, D) as (..., n_groups, size, D); the last row fills a short group."""
    *lead, n, dim = x.shape
    missing = -n % size
    if missing:
        x = mx.concatenate([x, mx.repeat(x[..., -1:, :], missing, axis=-2)], axis=-2)
    return x.astype(mx.float32).reshape(*lead, -1, size, dim)


def quantize_codes(x: mx.array, bits: int, group_size: int = 32) -> tuple[mx.array, GroupParams]:
    """Codes (..., n_groups, g, D) of rows (..., N, D), each channel on a grid over g rows."""
    groups = _grouped(x, group_size)
    low = groups.min(axis=-2, keepdims=True)
    scale = (groups.max(axis=-2, keepdims=True) - low) / ((1 << bits) - 1)
    codes = mx.round((groups - low) / mx.where(scale > 0, scale, 1.0))
    return codes.astype(mx.uint8), GroupParams(scale, low, x.shape[-2], bits)


def compute_reuse_params(
    x: mx.array, codes: mx.array, bits: int, group_size: int = 32
) -> GroupParams:
    """Scale and offset with which another layer's codes come nearest to rows (..., N, D)."""
    groups = _grouped(x, group_size).swapaxes(-1, -2)
    scale, zero = least_squares(groups, codes.swapaxes(-1, -2))
    return GroupParams(scale.swapaxes(-1, -2), zero.swapaxes(-1, -2), x.shape[-2], bits)


def dequant_with_params(codes: mx.array, params: GroupParams) -> mx.array:
    """Rows (..., n_rows, D) fp16 of codes with these parameters."""
    return dequant_with_params_batched(codes, params)


def quantize_residual(x: mx.array, recon: mx.array, bits: int, group_size: int = 32) -> mx.array:
    """What rows (..., N, D) differ from `recon`, rounded at `bits` of at least 1, fp16.

    Raises:
        ValueError: for less than one bit.
    """
    return quantize_residual_batched(x, recon, bits, group_size)


def quantize_codes_batched(
    x: mx.array, bits: int, group_size: int = 32
) -> tuple[mx.array, GroupParams]:
    """As `quantize_codes` for rows (..., N, D)."""
    return quantize_codes(x, bits, group_size)


def compute_reuse_params_batched(
    x: mx.array, codes: mx.array, bits: int, group_size: int = 32
) -> GroupParams:
    """As `compute_reuse_params` for rows (..., N, D)."""
    return compute_reuse_params(x, codes, bits, group_size)


def dequant_with_params_batched(
    codes: mx.array, params: GroupParams, out_dtype: mx.Dtype = mx.float16
) -> mx.array:
    """Rows (..., n_rows, D) of codes with these parameters."""
    rows = codes.astype(mx.float32) * params.scale + params.zero
    *lead, groups, size, dim = rows.shape
    return rows.reshape(*lead, groups * size, dim)[..., : params.n_rows, :].astype(out_dtype)


def quantize_residual_batched(
    x: mx.array,
    recon: mx.array,
    bits: int,
    group_size: int = 32,
    out_dtype: mx.Dtype = mx.float16,
) -> mx.array:
    """As `quantize_residual`, in `out_dtype`."""
    if bits < 1:
        raise ValueError(f"bits={bits}; a residual takes at least 1 bit")
    rest = x.astype(mx.float32) - recon.astype(mx.float32)
    return on_grid(rest.swapaxes(-1, -2), bits, group_size).swapaxes(-1, -2).astype(out_dtype)


def cross_layer_similarity(a: mx.array, b: mx.array) -> dict[str, float]:
    """How alike rows (..., D) of two layers are: `mse` of elements and mean `cosine` of rows."""
    left, right = a.astype(mx.float32), b.astype(mx.float32)
    lengths = mx.linalg.norm(left, axis=-1) * mx.linalg.norm(right, axis=-1)
    cosine = ((left * right).sum(axis=-1) / mx.maximum(lengths, 1e-30)).mean()
    pair: list[float] = mx.stack([mx.square(left - right).mean(), cosine]).tolist()  # type: ignore[assignment]
    return {"mse": pair[0], "cosine": pair[1]}
