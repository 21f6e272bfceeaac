"""Low-rank factors of many small matrices at once, by power iteration.

A few products and Gram–Schmidt steps over whole batches: no decomposition, no wait for the device.
Source: GEAR (arXiv 2403.05527), section 3; PowerSGD (arXiv 1905.13727).
"""

from functools import lru_cache

import mlx.core as mx
import numpy as np

LOOPS = 4
_RELATIVE = 1e-6
_TINY = 1e-30


@lru_cache(maxsize=32)
def _start(dim: int, rank: int) -> mx.array:
    """A fixed random (dim, rank) to start from."""
    draw = np.random.default_rng(dim).standard_normal((dim, rank))
    out = mx.array(draw.astype(np.float32))
    mx.eval(out)
    return out


def orthonormal(q: mx.array) -> mx.array:
    """Columns of (..., n, r) made orthonormal in order; dependent ones become zero."""
    columns: list[mx.array] = []
    for j in range(q.shape[-1]):
        column = q[..., j : j + 1]
        before = _length(column)
        if columns:
            basis = columns[0] if j == 1 else mx.concatenate(columns, axis=-1)
            for _ in range(2):  # once leaves what rounding put back
                column = column - basis @ (basis.swapaxes(-1, -2) @ column)
        length = _length(column)
        alive = length > _RELATIVE * before
        columns.append(mx.where(alive, column / mx.maximum(length, _TINY), 0.0))
    return columns[0] if len(columns) == 1 else mx.concatenate(columns, axis=-1)


def _length(column: mx.array) -> mx.array:
    peak = mx.maximum(mx.abs(column).max(axis=-2, keepdims=True), _TINY)
    return peak * mx.sqrt(mx.square(column / peak).sum(axis=-2, keepdims=True))


def low_rank(x: mx.array, rank: int, loops: int = LOOPS) -> tuple[mx.array, mx.array]:
    """Factors of the best rank-`rank` approximation, nearly.

    Args:
        x: (..., n, d) fp32; every matrix is treated alone.
        rank: columns wanted, at least 1.
        loops: power iterations; four come within 3 % of the optimal error at ranks up to 4, where
            the spectrum is nearly flat, and closer where it is not.

    Returns:
        Orthonormal columns (..., n, rank) and coefficients (..., rank, d) with `x ≈ a @ b`.
    """
    lead = x.shape[:-2]
    # Broadcast to the batch: one tall product would round a matrix by how many come with it.
    p = mx.broadcast_to(_start(x.shape[-1], rank), (*lead, x.shape[-1], rank))
    q = x @ p
    for i in range(loops):
        q = orthonormal(q)
        p = x.swapaxes(-1, -2) @ q
        if i + 1 < loops:
            q = x @ p
    return q, p.swapaxes(-1, -2)
