"""Linear maps of the coded bases: seeded randomized Hadamard rotations, and given matrices.

`rotate` is used on what is stored, and a vector's result does not depend on how many are mapped at
once: the transform runs row by row, and matrices are applied to blocks of one fixed size, since a
product of another size may round otherwise. Queries and outputs use one product, once a call.
Source: TurboQuant (arXiv 2504.19874); two rounds, since one leaves a one-hot vector far from
Gaussian (dossier figure: error 0.041 instead of 0.36 at one bit).
"""

from functools import lru_cache
from typing import Protocol

import mlx.core as mx
import numpy as np

from veloxquant.math.rotation import hadamard_blocks, make_hadamard_diagonal

_BLOCK = 8
"""Rows of a product on stored vectors; few, so that BLAS treats every place in them alike."""


class Orthogonal(Protocol):
    """A linear map from the model's channels to those that are coded, and its transpose."""

    matrix: mx.array

    def rotate(self, x: mx.array) -> mx.array:
        """Map fp32 rows (..., D) that are stored."""
        ...

    def rotate_query(self, q: mx.array) -> mx.array:
        """The same map for a few queries."""
        ...

    def unrotate(self, x: mx.array) -> mx.array:
        """The transposed map, for sums of coded rows."""
        ...


class Rotation:
    """Orthogonal map of R^dim, the same for every layer, head and sequence of one seed."""

    def __init__(self, dim: int, seed: int) -> None:
        self.dim, self.seed = dim, seed
        self.blocks = hadamard_blocks(dim)
        self.signs = np.stack([make_hadamard_diagonal(dim, seed + 7919 * r) for r in (1, 2)])
        """(2, dim) fp32 signs of the two rounds."""
        self._signs = [mx.array(row) for row in self.signs]
        # Blocks do not mix among themselves; a permutation between the rounds does that.
        order = np.random.default_rng(seed + 104_729).permutation(dim)
        self._shuffle = mx.array(order.astype(np.uint32)) if len(self.blocks) > 1 else None
        self.matrix = self.rotate(mx.eye(dim)).T
        """(dim, dim) fp32; `x @ matrix.T` equals `rotate(x)` up to rounding."""
        mx.eval(self._signs, self.matrix)

    def _round(self, x: mx.array) -> mx.array:
        if len(self.blocks) == 1:
            return mx.hadamard_transform(x)
        parts, start = [], 0
        for size in self.blocks:
            part = mx.contiguous(x[..., start : start + size])
            parts.append(mx.hadamard_transform(part) if size > 1 else part)
            start += size
        return mx.concatenate(parts, axis=-1)

    def rotate(self, x: mx.array) -> mx.array:
        """Rotate the last axis of fp32 vectors (..., dim)."""
        x = self._round(x * self._signs[0])
        if self._shuffle is not None:
            x = mx.take(x, self._shuffle, axis=-1)
        return self._round(x * self._signs[1])

    def rotate_query(self, q: mx.array) -> mx.array:
        """The same map for a few vectors, as one product."""
        return q @ self.matrix.T.astype(q.dtype)

    def product(self) -> np.ndarray:
        """What `rotate_query` multiplies by, (dim, dim)."""
        return np.asarray(self.matrix).T

    def unrotate(self, x: mx.array) -> mx.array:
        """Inverse of `rotate_query`."""
        return x @ self.matrix.astype(x.dtype)

    def __deepcopy__(self, memo: object) -> "Rotation":
        """Constants are shared by copies."""
        return self


class Matrix:
    """A given matrix (rows, D) as such a map; also (H, rows, D), one for each head."""

    def __init__(self, matrix: mx.array | np.ndarray) -> None:
        self.matrix = mx.array(matrix, dtype=mx.float32)
        mx.eval(self.matrix)

    def rotate(self, x: mx.array) -> mx.array:
        """Rows (B, H, n, D) times the transposed matrix, in blocks of a fixed size."""
        *lead, n, dim = x.shape
        blocks = -(-n // _BLOCK)
        if blocks * _BLOCK > n:
            x = mx.pad(x, [(0, 0)] * len(lead) + [(0, blocks * _BLOCK - n), (0, 0)])
        turned = mx.expand_dims(self.matrix.swapaxes(-1, -2), -3)
        # Broadcast, or MLX makes one product of all blocks.
        turned = mx.broadcast_to(turned, (*lead, blocks, *turned.shape[-2:]))
        out = x.reshape(*lead, blocks, _BLOCK, dim) @ turned
        return out.reshape(*lead, blocks * _BLOCK, -1)[..., :n, :]

    def rotate_query(self, q: mx.array) -> mx.array:
        """Queries (B, H, M, D) times the transposed matrix."""
        return q @ self.matrix.swapaxes(-1, -2).astype(q.dtype)

    def product(self) -> np.ndarray:
        """What `rotate_query` multiplies by, (D, rows) or (H, D, rows)."""
        return np.asarray(self.matrix).swapaxes(-1, -2)

    def unrotate(self, x: mx.array) -> mx.array:
        """Rows (B, H, M, rows) times the matrix."""
        return x @ self.matrix.astype(x.dtype)

    def __deepcopy__(self, memo: object) -> "Matrix":
        """Constants are shared by copies."""
        return self


@lru_cache(maxsize=32)
def rotation(dim: int, seed: int) -> Rotation:
    """The shared rotation of one size and seed."""
    return Rotation(dim, seed)
