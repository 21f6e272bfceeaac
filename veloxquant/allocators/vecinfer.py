"""Calibration of `vecinfer`: smooth factors, the dual transform, codebooks, and product codes.

Source: VecInfer (arXiv 2510.06175), equations 3 to 7.
"""

import math

import mlx.core as mx
import numpy as np

from veloxquant.math.kmeans import Nearest, kmeans

LEAST_SMOOTH = 1e-2
MOST_SMOOTH = 1e3


def calibrate_smooth_factors(keys_calib: mx.array, eps: float = 1e-4) -> mx.array:
    """Smooth factor of each channel: `sqrt(max |K|)` over tokens, the maximum floored at `eps`.

    Args:
        keys_calib: (tokens, heads, dim) or (tokens, dim).
        eps: least maximum, for dead channels.

    Returns:
        (heads, dim) or (dim,) fp32.
    """
    return mx.sqrt(mx.maximum(mx.abs(keys_calib.astype(mx.float32)).max(axis=0), eps))


def clamp_smooth_factors(smooth: mx.array) -> mx.array:
    """Factors within [0.01, 1000], so that a dead channel does not amplify noise."""
    return mx.clip(smooth.astype(mx.float32), LEAST_SMOOTH, MOST_SMOOTH)


def walsh_hadamard_matrix(d: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Orthonormal Walsh–Hadamard matrix (d, d).

    Raises:
        ValueError: when `d` is not a power of two.
    """
    if d < 1 or d & (d - 1):
        raise ValueError(f"d={d} has no Walsh–Hadamard matrix; give a power of two")
    h = np.ones((1, 1))
    while len(h) < d:
        h = np.block([[h, h], [h, -h]])
    return mx.array(h / math.sqrt(d)).astype(dtype)


def _by_head(smooth: mx.array, rows: mx.array, *, queries: bool) -> mx.array:
    """Factors (D,) or (H, D) against rows (..., heads, n, D)."""
    if smooth.ndim == 1:
        return smooth
    have, heads = smooth.shape[0], rows.shape[-3] if rows.ndim >= 3 else 1
    if have == heads:
        return smooth[:, None, :]
    if queries and rows.ndim >= 3 and heads % have == 0:
        return mx.repeat(smooth, heads // have, axis=0)[:, None, :]
    if queries:
        raise ValueError(
            f"queries of {heads} heads do not go with the smooth factors of {have} KV heads; "
            f"give a multiple of them"
        )
    return smooth.mean(axis=0)


def _checked(rows: mx.array, smooth: mx.array) -> None:
    if smooth.ndim not in (1, 2) or smooth.shape[-1] != rows.shape[-1]:
        raise ValueError(
            f"smooth factors of shape {smooth.shape} for rows of {rows.shape[-1]} channels; "
            f"give (dim,) or (heads, dim)"
        )


def apply_dual_transform_keys(K: mx.array, smooth: mx.array, H: mx.array) -> mx.array:
    """`(K / smooth) @ H` for keys (..., heads, n, D).

    Args:
        K: keys.
        smooth: (D,), or (heads, D) with heads on axis -3; where their number differs, the mean of
            the rows serves all heads.
        H: orthonormal (D, D).

    Raises:
        ValueError: when the factors have another number of channels.
    """
    _checked(K, smooth)
    return (K / _by_head(smooth, K, queries=False)) @ H


def apply_dual_transform_queries(q: mx.array, smooth: mx.array, H: mx.array) -> mx.array:
    """`(q · smooth) @ H`, so that products with transformed keys are those with the keys.

    Args:
        q: queries (..., heads, n, D); each KV head's factors serve its group of query heads.
        smooth: (D,) or (KV heads, D).
        H: orthonormal (D, D).

    Raises:
        ValueError: when channels or heads do not fit.
    """
    _checked(q, smooth)
    return (q * _by_head(smooth, q, queries=True)) @ H


def train_codebook(x: mx.array, n_centroids: int, max_iter: int = 30, seed: int = 42) -> mx.array:
    """Codebook (n_centroids, sub_dim) fp32 of sub-vectors (n, sub_dim), by k-means.

    Raises:
        ValueError: without sub-vectors, or for fewer than one centroid or round.
    """
    if x.ndim != 2 or x.shape[0] == 0:
        raise ValueError(f"sub-vectors of shape {x.shape}; give (n, sub_dim) with n at least 1")
    if n_centroids < 1 or max_iter < 1:
        raise ValueError(f"n_centroids={n_centroids} and max_iter={max_iter} must be at least 1")
    return mx.array(kmeans(np.array(x.astype(mx.float32)), n_centroids, max_iter, seed)[0])


def quantize_vq(x: mx.array, codebook: mx.array, sub_dim: int) -> mx.array:
    """Nearest entries of (K, sub_dim) for (..., D): (..., D / sub_dim) int32, ties to the lowest.

    Raises:
        ValueError: when `sub_dim` does not divide D or is not that of the codebook.
    """
    if x.shape[-1] % sub_dim or codebook.shape[-1] != sub_dim:
        raise ValueError(
            f"sub_dim={sub_dim} must divide the {x.shape[-1]} channels and be the codebook's "
            f"{codebook.shape[-1]}"
        )
    rows = np.array(x.astype(mx.float32)).reshape(-1, sub_dim)
    codes = Nearest(np.array(codebook.astype(mx.float32)))(rows)
    return mx.array(codes.astype(np.int32)).reshape(*x.shape[:-1], x.shape[-1] // sub_dim)


def dequantize_vq(indices: mx.array, codebook: mx.array) -> mx.array:
    """Codes (..., n_sub) as rows (..., n_sub · sub_dim)."""
    return mx.take(codebook, indices, axis=0).flatten(-2)


def compute_query_lut(q_tilde: mx.array, codebook: mx.array, sub_dim: int) -> mx.array:
    """Products of each piece of transformed queries (..., D) with every entry: (..., n_sub, K)."""
    pieces = q_tilde.reshape(*q_tilde.shape[:-1], q_tilde.shape[-1] // sub_dim, sub_dim)
    return pieces @ codebook.T.astype(pieces.dtype)
