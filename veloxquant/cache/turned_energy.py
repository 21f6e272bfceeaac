"""Second moments that joined keys will have at later positions, from a few keys at known ones."""

from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.cache.joined_heads import joined, parted
from veloxquant.cache.rope import turned_back
from veloxquant.cache.turned_moments import PLACES, TurnedMoments


class TurnedEnergy(TurnedMoments):
    """As `TurnedMoments`, not centred, for rows of `size` heads side by side."""

    def __init__(self, rope: Any, first: int, size: int) -> None:
        super().__init__(rope, first)
        self.size = size

    def energy(self, x: mx.array) -> np.ndarray:
        """Second moments (B, G, D, D) over a context, of keys (B, G, n, D) at `first` and on."""
        rows = parted(x.astype(mx.float32), self.size)
        heads = turned_back(self.rope, rows, self.first, self.positions)
        still = np.array(joined(heads, self.size), dtype=np.float64)
        moments = still.swapaxes(-1, -2) @ still / still.shape[2]
        batch, groups, wide, _ = moments.shape
        dim = wide // self.size
        # Every head turns by itself: by pairs of heads.
        pairs = moments.reshape(batch, groups, self.size, dim, self.size, dim).swapaxes(3, 4)
        total = np.zeros_like(pairs)
        for turn in self._turns(dim):
            total += turn.T @ pairs @ turn
        return total.swapaxes(3, 4).reshape(moments.shape) / PLACES
