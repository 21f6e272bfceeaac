"""Ways to choose the levels of a scalar codebook, under their documented names.

Source: Lloyd (1982), Max (1960); the Beta law of TurboQuant (arXiv 2504.19874), the angle law of
PolarQuant (arXiv 2502.02617).
"""

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from veloxquant.core.abstractions import CodebookStrategy
from veloxquant.core.constants import LLOYD_MAX_N_QUAD
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.core.registry import CodebookRegistry
from veloxquant.math.distributions import beta_pdf, gaussian_pdf, polar_angle_pdf
from veloxquant.math.lloyd_max import lloyd_max, normal_levels

MAX_BITS = 8
"""Indices are uint8."""
_SWEEPS = 20_000
_SWEPT_BITS = 5
_NORMAL = NormalDist()
# Sweeps stop when no level moves by more than this share of the spread.
_TOLERANCE = 1e-7


def check_bits(b: int, least: int = 1) -> None:
    """Refuse a width that uint8 indices cannot hold.

    Raises:
        QuantizerConfigError: naming the legal range.
    """
    if not isinstance(b, int) or isinstance(b, bool) or not least <= b <= MAX_BITS:
        raise QuantizerConfigError(f"b={b!r}; a codebook has {least} to {MAX_BITS} bits")


def _check_dim(d: int, least: int) -> None:
    if d < least:
        raise QuantizerConfigError(f"d={d!r}; vectors have at least {least} coordinates here")


@CodebookRegistry.register("lloyd_max_gaussian")
class LloydMaxGaussianStrategy(CodebookStrategy):
    """Best levels for N(0, 1/d).

    `support_sigma_factor` bounds the interval that is looked at, in standard deviations; from 6 on
    it makes no difference and the levels for the whole line are taken.
    """

    def __init__(self, support_sigma_factor: float = 6.0) -> None:
        if support_sigma_factor <= 0:
            raise QuantizerConfigError(
                f"support_sigma_factor={support_sigma_factor!r} must be above 0"
            )
        self.support_sigma_factor = support_sigma_factor

    def compute_centroids(self, b: int, d: int) -> np.ndarray:
        """Levels (2^b,) ascending, float64."""
        check_bits(b)
        _check_dim(d, 1)
        factor = self.support_sigma_factor
        unit = _gaussian(b) if factor >= 6 else _gaussian_within(b, factor)
        return unit / math.sqrt(d)


@lru_cache(maxsize=16)
def _gaussian(b: int) -> np.ndarray:
    """Levels for N(0, 1): the shared table, and Newton's method where sweeps crawl."""
    if b <= _SWEPT_BITS:
        return np.asarray(normal_levels(b))
    n = 1 << b
    levels = np.array([math.sqrt(3) * _NORMAL.inv_cdf((k + 0.5) / n) for k in range(n)])
    for _ in range(50):
        cuts = (levels[:-1] + levels[1:]) / 2
        below = np.concatenate([[0.0], [_NORMAL.cdf(t) for t in cuts], [1.0]])
        density = np.concatenate([[0.0], gaussian_pdf(cuts), [0.0]])
        mass = np.diff(below)
        mean = -np.diff(density) / mass
        # How a cell's mean moves with the levels on its two sides, half of each cut.
        upper = density[1:-1] * (cuts - mean[:-1]) / mass[:-1] / 2
        lower = density[1:-1] * (mean[1:] - cuts) / mass[1:] / 2
        slope = np.diag(np.concatenate([upper, [0]]) + np.concatenate([[0], lower]))
        slope += np.diag(upper, 1) + np.diag(lower, -1)
        step = np.linalg.solve(np.eye(n) - slope, mean - levels)
        levels = np.sort(levels + step)
        if np.abs(step).max() < 1e-10:
            break
    return (levels - levels[::-1]) / 2


@lru_cache(maxsize=32)
def _gaussian_within(b: int, factor: float) -> np.ndarray:
    return lloyd_max(gaussian_pdf, (-factor, factor), 1 << b, _SWEEPS, _TOLERANCE)[0]


@CodebookRegistry.register("lloyd_max_beta")
class LloydMaxBetaStrategy(CodebookStrategy):
    """Best levels for one coordinate of a uniform point on the unit sphere."""

    def compute_centroids(self, b: int, d: int) -> np.ndarray:
        """Levels (2^b,) ascending, float64; `d` is at least 3."""
        check_bits(b)
        _check_dim(d, 3)
        return _beta(b, d).copy()


@lru_cache(maxsize=64)
def _beta(b: int, d: int) -> np.ndarray:
    edge = min(1.0, 9 / math.sqrt(d))
    levels, _ = lloyd_max(
        lambda x: beta_pdf(x, d), (-edge, edge), 1 << b, _SWEEPS, _TOLERANCE / math.sqrt(d)
    )
    return (levels - levels[::-1]) / 2  # the density is even


@CodebookRegistry.register("polar_angle_sampling")
class PolarAngleSamplingStrategy(CodebookStrategy):
    """Best levels for the polar angle at a level of the recursion, 1 the outermost."""

    def __init__(self, level: int = 1) -> None:
        if level < 1:
            raise QuantizerConfigError(f"level={level!r}; levels count from 1")
        self.level = level

    def compute_centroids(self, b: int, d: int) -> np.ndarray:  # noqa: ARG002 - same for any d
        """Levels (2^b,) ascending in radians, float64."""
        check_bits(b)
        return _polar(b, self.level).copy()


@lru_cache(maxsize=64)
def _polar(b: int, level: int) -> np.ndarray:
    n = 1 << b
    if level == 1:  # uniform: cell midpoints are the fixed point
        return (np.arange(n) + 0.5) * (2 * math.pi / n)
    # The density narrows like 2^(-level/2) around π/4.
    reach = min(math.pi / 4, 9 * 2 ** (-level / 2))
    levels, _ = lloyd_max(
        lambda t: polar_angle_pdf(t, level), (math.pi / 4 - reach, math.pi / 4 + reach), n,
        _SWEEPS, _TOLERANCE * reach, LLOYD_MAX_N_QUAD,
    )  # fmt: skip
    return math.pi / 4 + (levels - levels[::-1]) / 2  # even around π/4


@CodebookRegistry.register("uniform")
class UniformStrategy(CodebookStrategy):
    """Midpoints of equal cells on [lo, hi]."""

    def __init__(self, lo: float = -1.0, hi: float = 1.0) -> None:
        if not lo < hi:
            raise QuantizerConfigError(f"lo={lo!r} must lie below hi={hi!r}")
        self.lo, self.hi = lo, hi

    def compute_centroids(self, b: int, d: int) -> np.ndarray:  # noqa: ARG002 - same for any d
        """Levels (2^b,) ascending, float64."""
        check_bits(b)
        n = 1 << b
        return self.lo + (np.arange(n) + 0.5) * ((self.hi - self.lo) / n)
