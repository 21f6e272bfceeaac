"""Detector of outlier channels: the loudest ones among the first keys."""

from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.core.constants import DEFAULT_N_CALIB_TOKENS, DEFAULT_N_OUTLIER_CHANNELS
from veloxquant.core.exceptions import QuantizerConfigError

__path__ = []  # the documented submodule is a name of this one: see veloxquant.documented
__all__ = ["OutlierDetector"]


class OutlierDetector:
    """The `n_outliers` channels of largest mean magnitude over the first `n_calib` keys."""

    def __init__(
        self,
        n_outliers: int = DEFAULT_N_OUTLIER_CHANNELS,
        n_calib: int = DEFAULT_N_CALIB_TOKENS,
    ) -> None:
        if n_outliers < 1 or n_calib < 1:
            raise QuantizerConfigError(
                f"n_outliers={n_outliers!r} and n_calib={n_calib!r} must be at least 1"
            )
        self.n_outliers, self.n_calib = n_outliers, n_calib
        self.reset()

    def reset(self) -> None:
        """Start over."""
        self._sum: np.ndarray | None = None
        self._count = 0

    @property
    def is_calibrated(self) -> bool:
        """Whether enough keys were seen."""
        return self._count >= self.n_calib

    @property
    def n_observed(self) -> int:
        """Keys counted, at most `n_calib`."""
        return self._count

    def observe(self, k: Any) -> None:
        """Count keys (d,) or (n, d); those after the first `n_calib` change nothing.

        Raises:
            ValueError: when the length differs from that of earlier keys, or is too short.
        """
        if isinstance(k, mx.array):
            k = np.array(k.astype(mx.float32))
        rows = np.atleast_2d(np.asarray(k, dtype=np.float64))
        if rows.shape[1] <= self.n_outliers:
            raise ValueError(f"keys of {rows.shape[1]} channels for {self.n_outliers} outliers")
        total = np.zeros(rows.shape[1]) if self._sum is None else self._sum
        if len(total) != rows.shape[1]:
            raise ValueError(f"keys of {rows.shape[1]} channels after keys of {len(total)}")
        rows = rows[: self.n_calib - self._count]
        self._sum = total + np.abs(rows).sum(axis=0)
        self._count += len(rows)

    def get_outlier_channels(self) -> np.ndarray:
        """Channel positions (n_outliers,) int32 ascending; ties go to the lowest channel.

        Raises:
            RuntimeError: before enough keys were seen.
        """
        if self._sum is None or not self.is_calibrated:
            raise RuntimeError(
                f"{self._count} of {self.n_calib} keys seen; observe more before asking"
            )
        loudest = np.argsort(-self._sum, kind="stable")[: self.n_outliers]
        return np.sort(loudest).astype(np.int32)
