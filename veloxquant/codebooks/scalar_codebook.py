"""Scalar codebook: sorted levels, cells that end halfway between them."""

from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.core.abstractions import Codebook
from veloxquant.core.constants import VORONOI_LINEAR_THRESHOLD
from veloxquant.core.exceptions import CodebookDimensionMismatch


class ScalarCodebook(Codebook):
    """Levels (k,), k a power of two up to 256; a value on a boundary goes to the lower cell."""

    def __init__(self, centroids: np.ndarray) -> None:
        levels = np.asarray(centroids, dtype=np.float32).reshape(-1)
        k = len(levels)
        if k < 2 or k > 256 or k & (k - 1):
            raise CodebookDimensionMismatch(
                f"{k} levels; a codebook has 2, 4, ... or 256, one for every index"
            )
        if not np.isfinite(levels).all():
            raise CodebookDimensionMismatch("levels must be finite numbers")
        self._levels = np.sort(levels)
        self._levels_mx = mx.array(self._levels)
        self._cuts = mx.array((self._levels[:-1] + self._levels[1:]) / 2)

    @property
    def k(self) -> int:
        """Number of levels."""
        return len(self._levels)

    @property
    def b(self) -> int:
        """Bits of an index."""
        return self.k.bit_length() - 1

    def quantize(self, y: Any) -> mx.array:
        """Index of the nearest level for each element, uint8."""
        y = _fp32(y)
        if self.k > VORONOI_LINEAR_THRESHOLD:
            return self._search(y)
        index = mx.zeros(y.shape, dtype=mx.uint8)
        for i in range(self.k - 1):
            index = index + (y > self._cuts[i])
        return index

    def _search(self, y: mx.array) -> mx.array:
        """Binary search: one step a bit."""
        index = mx.zeros(y.shape, dtype=mx.uint32)
        for bit in reversed(range(self.b)):
            probe = index + (1 << bit)
            index = mx.where(y > mx.take(self._cuts, probe - 1), probe, index)
        return index.astype(mx.uint8)

    def dequantize(self, idx: Any) -> mx.array:
        """Levels at the indices, fp32."""
        idx = idx if isinstance(idx, mx.array) else mx.array(np.asarray(idx))
        return mx.take(self._levels_mx, idx.astype(mx.uint32))

    def nearest_numpy(self, value: float) -> int:
        """Index of the level nearest to one number."""
        cuts = (self._levels[:-1] + self._levels[1:]) / 2
        return int(np.searchsorted(cuts, np.float32(value), side="left"))

    def centroids_numpy(self) -> np.ndarray:
        """Levels (k,) fp32 ascending."""
        return self._levels.copy()

    def centroids_mx(self) -> mx.array:
        """Levels (k,) fp32 ascending."""
        return self._levels_mx

    def boundaries_mx(self) -> mx.array:
        """Inner boundaries (k - 1,) fp32."""
        return self._cuts


def _fp32(y: Any) -> mx.array:
    if not isinstance(y, mx.array):
        y = mx.array(np.asarray(y, dtype=np.float32))
    return y.astype(mx.float32)
