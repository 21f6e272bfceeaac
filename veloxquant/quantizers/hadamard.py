"""The orthonormal Hadamard rotation, with a scale for each channel in front of it if wanted.

Sizes that have no Hadamard matrix are rotated in blocks that have one. The map of stored rows runs
row by row, so that a row's result does not depend on how many are mapped at once; queries and sums
use the same map as a dense matrix.
"""

from functools import lru_cache

import mlx.core as mx

from veloxquant.math.rotation import hadamard_blocks


def hadamard_rows(x: mx.array) -> mx.array:
    """The last axis of fp32 rows (..., D) rotated, in blocks where D has no Hadamard matrix."""
    blocks = hadamard_blocks(x.shape[-1])
    if len(blocks) == 1:
        return mx.hadamard_transform(x)
    parts, start = [], 0
    for size in blocks:
        part = mx.contiguous(x[..., start : start + size])
        parts.append(mx.hadamard_transform(part) if size > 1 else part)
        start += size
    return mx.concatenate(parts, axis=-1)


@lru_cache(maxsize=32)
def hadamard_matrix(dim: int) -> mx.array:
    """(D, D) fp32 with `hadamard_rows(x) == x @ matrix`; orthonormal, not always symmetric."""
    matrix = hadamard_rows(mx.eye(dim))
    mx.eval(matrix)
    return matrix


class SmoothHadamard:
    """`y = (x / smooth) H` for stored rows; queries take `(q · smooth) H`, so products agree.

    `smooth` is None, (D,), or (H, D) with one row a KV head, in fp32.
    """

    def __init__(self, dim: int, smooth: mx.array | None = None) -> None:
        self.dim = dim
        self.matrix = hadamard_matrix(dim)
        self.smooth = smooth if smooth is None or smooth.ndim == 1 else smooth[:, None, :]

    def rotate(self, x: mx.array) -> mx.array:
        """Rows (B, H, n, D) in fp32 as they are stored."""
        return hadamard_rows(x if self.smooth is None else x / self.smooth)

    def rotate_query(self, q: mx.array) -> mx.array:
        """Queries (B, H, M, D) whose products with stored rows are those with the rows."""
        q = q if self.smooth is None else q * self.smooth.astype(q.dtype)
        return q @ self.matrix.astype(q.dtype)

    def unrotate(self, x: mx.array) -> mx.array:
        """Stored rows, or sums of them, (B, H, M, D), as rows."""
        out = x @ self.matrix.T.astype(x.dtype)
        return out if self.smooth is None else out * self.smooth.astype(x.dtype)

    def __deepcopy__(self, memo: object) -> "SmoothHadamard":
        """Constants are shared by copies."""
        return self


@lru_cache(maxsize=32)
def hadamard(dim: int) -> SmoothHadamard:
    """The rotation of one size without scales."""
    return SmoothHadamard(dim)
