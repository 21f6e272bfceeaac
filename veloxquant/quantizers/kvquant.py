"""Outlier split and fitted levels on plain matrices, for analysis; caches use `nuq`.

Everything works column by column: a column is a channel of keys.
"""

import math
from typing import NamedTuple

import mlx.core as mx

from veloxquant.quantizers.levels import lloyd_levels
from veloxquant.quantizers.sparse import mark


class DenseSparse(NamedTuple):
    """Inliers (N, D) fp32, in which outliers are their column's mean, and what was taken out.

    `outlier_mask` (N, D) bool; `outlier_vals` (N, D) fp32, zero where nothing was taken out.
    """

    inliers: mx.array
    outlier_mask: mx.array
    outlier_vals: mx.array


def split_dense_sparse(x: mx.array, outlier_fraction: float) -> DenseSparse:
    """Take the share of largest magnitudes, rounded up, out of each column of (N, D)."""
    return DenseSparse(*(a[0] for a in split_dense_sparse_batched(x[None], outlier_fraction)))


def split_dense_sparse_batched(x: mx.array, outlier_fraction: float) -> DenseSparse:
    """As `split_dense_sparse` for (BH, N, D)."""
    x = x.astype(mx.float32)
    count = math.ceil(outlier_fraction * x.shape[1] - 1e-9)
    mask = mark(mx.abs(x).swapaxes(-1, -2), count).swapaxes(-1, -2)
    kept = mx.maximum(x.shape[1] - mask.sum(axis=1, keepdims=True), 1)
    mean = mx.where(mask, 0.0, x).sum(axis=1, keepdims=True) / kept
    return DenseSparse(mx.where(mask, mean, x), mask, mx.where(mask, x, 0.0))


def fit_nuq_levels(x: mx.array, bits: int, n_iters: int = 8) -> mx.array:
    """Levels of each column of (N, D): (2^bits, D) fp32 ascending, quantiles and Lloyd sweeps."""
    return fit_nuq_levels_batched(x[None], bits, n_iters)[0]


def fit_nuq_levels_batched(x: mx.array, bits: int, n_iters: int = 8) -> mx.array:
    """As `fit_nuq_levels` for (BH, N, D)."""
    columns = x.astype(mx.float32).swapaxes(-1, -2)
    return lloyd_levels(columns, bits, n_iters).swapaxes(-1, -2)


def quantize_nuq(x: mx.array, levels: mx.array) -> mx.array:
    """Nearest levels (L, D) of (N, D): int32 codes (N, D)."""
    return quantize_nuq_batched(x[None], levels[None])[0]


def quantize_nuq_batched(x: mx.array, levels: mx.array) -> mx.array:
    """As `quantize_nuq` for (BH, N, D) and (BH, L, D)."""
    cuts = (levels[:, :-1] + levels[:, 1:]) / 2
    codes = mx.zeros(x.shape, dtype=mx.int32)
    for i in range(cuts.shape[1]):
        codes = codes + (x.astype(mx.float32) > cuts[:, i : i + 1]).astype(mx.int32)
    return codes


def dequant_nuq(codes: mx.array, levels: mx.array) -> mx.array:
    """Levels (L, D) at codes (N, D), fp16."""
    return dequant_nuq_batched(codes[None], levels[None])[0]


def dequant_nuq_batched(codes: mx.array, levels: mx.array) -> mx.array:
    """As `dequant_nuq` for (BH, N, D) and (BH, L, D)."""
    return mx.take_along_axis(levels, codes, axis=1).astype(mx.float16)


def nuq_quant_dequant(
    x: mx.array, bits: int, outlier_fraction: float = 0.0, lloyd_iters: int = 8
) -> mx.array:
    """(N, D) split, coded with levels of its own and put together again, fp16."""
    parts = split_dense_sparse(x, outlier_fraction)
    levels = fit_nuq_levels(parts.inliers, bits, lloyd_iters)
    coded = dequant_nuq(quantize_nuq(parts.inliers, levels), levels)
    return mx.where(parts.outlier_mask, parts.outlier_vals.astype(mx.float16), coded)


def nuq_distortion(x: mx.array, levels: mx.array) -> float:
    """Mean squared error of (N, D) with levels (L, D)."""
    coded = mx.take_along_axis(levels, quantize_nuq(x, levels), axis=0)
    error = mx.square(coded - x.astype(mx.float32)).mean().item()
    assert isinstance(error, float)
    return error
