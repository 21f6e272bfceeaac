"""A scalar codebook that fits itself to the first rotated vectors it sees."""

import math
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.codebooks.base import CodebookFactory
from veloxquant.codebooks.scalar_codebook import ScalarCodebook
from veloxquant.codebooks.strategies import check_bits
from veloxquant.core.constants import DEFAULT_SEED
from veloxquant.core.exceptions import QuantizerConfigError

_SWEEPS = 200


class AdaptiveScalarCodebook:
    """Levels for N(0, 1/d) until `n_calib` vectors were observed, then levels fitted to those.

    The fit happens once, at the end of the call that completes the calibration, on all vectors
    of the calls so far; it is never worse on them than the levels it started from.
    """

    def __init__(
        self,
        b: int,
        d: int,
        n_calib: int = 64,
        default_codebook: ScalarCodebook | None = None,
        n_hist_bins: int = 64,
        seed: int = 0,
    ) -> None:
        check_bits(b)
        if n_calib < 1 or n_hist_bins < 2:
            raise QuantizerConfigError(
                f"n_calib={n_calib!r} must be at least 1 and n_hist_bins={n_hist_bins!r} at least 2"
            )
        self.d, self.n_calib, self.seed = d, n_calib, seed or DEFAULT_SEED
        # A histogram must resolve the cells of the code.
        self.n_hist_bins = max(n_hist_bins, 1 << (b + 3))
        self._b = b
        self._codebook = default_codebook or CodebookFactory.create("gaussian", b, d)
        if self._codebook.b != b:
            raise QuantizerConfigError(
                f"default_codebook has {self._codebook.b} bits, b={b}; give one of the same width"
            )
        self._seen: list[np.ndarray] = []
        self._n_seen = 0
        self._calibrated = False

    @property
    def is_calibrated(self) -> bool:
        """Whether the levels are fitted."""
        return self._calibrated

    @property
    def k(self) -> int:
        """Number of levels."""
        return 1 << self._b

    @property
    def b(self) -> int:
        """Bits of an index."""
        return self._b

    def get_codebook(self) -> tuple[np.ndarray, np.ndarray]:
        """Levels (k,) and inner boundaries (k - 1,), fp32."""
        return self._codebook.centroids_numpy(), np.array(self._codebook.boundaries_mx())

    @property
    def codebook(self) -> ScalarCodebook:
        """The codebook in force."""
        return self._codebook

    def observe(self, y: Any) -> None:
        """Take vectors (..., d) into the calibration; nothing happens once it is complete."""
        if self._calibrated:
            return
        if isinstance(y, mx.array):
            y = np.array(y.astype(mx.float32))
        rows = np.asarray(y, dtype=np.float32).reshape(-1, self.d)
        rows = rows[np.isfinite(rows).all(axis=-1)]
        self._seen.append(rows)
        self._n_seen += len(rows)
        if self._n_seen >= self.n_calib:
            self._fit(np.concatenate(self._seen).reshape(-1))
            self._seen.clear()

    def _fit(self, sample: np.ndarray) -> None:
        """Lloyd's iteration on a histogram of the sample, from the levels in force."""
        start = self._codebook.centroids_numpy().astype(np.float64)
        # An even law: rotations know no sign, so both signs of the sample count.
        values = np.concatenate([sample, -sample]).astype(np.float64)
        reach = float(np.abs(values).max())
        if reach > 0:
            # Bins of equal count: fine where the mass is, whatever the shape of the tails.
            edges = np.unique(np.quantile(values, np.linspace(0, 1, self.n_hist_bins + 1)))
            count, _ = np.histogram(values, edges) if len(edges) > 1 else (None, None)
            if count is not None:
                total, _ = np.histogram(values, edges, weights=values)
                levels = lloyd_on_bins(start, count.astype(np.float64), total)
                if _error(values, levels) < _error(values, start):
                    self._codebook = ScalarCodebook(levels)
        self._calibrated = True

    def quantize(self, y: Any) -> mx.array:
        """Index of the nearest level for each element, uint8."""
        return self._codebook.quantize(y)

    def dequantize(self, idx: Any) -> mx.array:
        """Levels at the indices, fp32."""
        return self._codebook.dequantize(idx)

    def centroids_numpy(self) -> np.ndarray:
        """Levels (k,) fp32 ascending."""
        return self._codebook.centroids_numpy()

    def centroids_mx(self) -> mx.array:
        """Levels (k,) fp32 ascending."""
        return self._codebook.centroids_mx()


def lloyd_on_bins(levels: np.ndarray, count: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Lloyd's iteration on bins given by weight and weighted sum; an empty cell keeps its level.

    Args:
        levels: (k,) ascending, where to start.
        count: (n,) weights of the bins.
        total: (n,) sums of the values in them.

    Returns:
        Levels (k,) ascending.
    """
    filled = count > 0
    count, total = count[filled], total[filled]
    centre = total / count
    for _ in range(_SWEEPS):
        cell = np.searchsorted((levels[:-1] + levels[1:]) / 2, centre)
        weight = np.bincount(cell, count, len(levels))
        new = np.where(
            weight > 0,
            np.bincount(cell, total, len(levels)) / np.where(weight > 0, weight, 1),
            levels,
        )
        moved = float(np.abs(new - levels).max())
        levels = np.sort(new)
        if moved < 1e-9 * math.sqrt(float(np.square(centre).mean()) + 1e-30):
            break
    return levels


def _error(values: np.ndarray, levels: np.ndarray) -> float:
    cell = np.searchsorted((levels[:-1] + levels[1:]) / 2, values)
    return float(np.square(values - levels[cell]).mean())
