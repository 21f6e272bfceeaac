import math

import numpy as np
import pytest

from veloxquant.codebooks.strategies import (
    LloydMaxBetaStrategy,
    LloydMaxGaussianStrategy,
    PolarAngleSamplingStrategy,
    UniformStrategy,
)
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.core.registry import CodebookRegistry
from veloxquant.math.distributions import beta_pdf

GAUSSIAN_ERROR = {1: 0.36338, 2: 0.11748, 3: 0.034548, 4: 0.009501}
BETA_ERROR = {1: 0.36089, 2: 0.11600, 3: 0.033966, 4: 0.0093148}
POLAR_LEVELS = {
    2: [0.310, 0.634, 0.937, 1.261],
    4: [0.524, 0.706, 0.865, 1.047],
    7: [0.691, 0.757, 0.814, 0.880],
}


def nearest_error(x: np.ndarray, levels: np.ndarray) -> np.ndarray:
    cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, x)
    return np.square(x - levels[cell])


@pytest.mark.parametrize("b", [1, 2, 3, 4])
def test_gaussian_levels_have_the_known_error(b: int) -> None:
    levels = LloydMaxGaussianStrategy().compute_centroids(b, 64) * 8
    assert np.allclose(levels, -levels[::-1], atol=1e-6)
    x = np.linspace(-8, 8, 400_001)
    weight = np.exp(-x * x / 2)
    error = (nearest_error(x, levels) * weight).sum() / weight.sum()
    assert error == pytest.approx(GAUSSIAN_ERROR[b], rel=1e-3)


@pytest.mark.parametrize("b", [1, 2, 3, 4])
def test_beta_levels_have_the_known_error(b: int) -> None:
    levels = LloydMaxBetaStrategy().compute_centroids(b, 128)
    x = np.linspace(-1, 1, 400_001)[1:-1]
    weight = beta_pdf(x, 128)
    error = (nearest_error(x, levels) * weight).sum() / weight.sum()
    assert 128 * error == pytest.approx(BETA_ERROR[b], rel=1e-3)
    assert np.allclose(levels, -levels[::-1], atol=1e-6)


def test_beta_levels_approach_gaussian_ones() -> None:
    beta = LloydMaxBetaStrategy().compute_centroids(2, 256)
    gaussian = LloydMaxGaussianStrategy().compute_centroids(2, 256)
    assert np.abs(beta - gaussian).max() * 16 < 0.01


def test_narrow_support_keeps_levels_inside() -> None:
    levels = LloydMaxGaussianStrategy(2.0).compute_centroids(4, 1)
    assert np.abs(levels).max() < 2
    assert len(np.unique(levels)) == 16


@pytest.mark.parametrize("level", POLAR_LEVELS)
def test_polar_levels_are_the_known_ones(level: int) -> None:
    found = PolarAngleSamplingStrategy(level).compute_centroids(2, 128)
    assert found == pytest.approx(POLAR_LEVELS[level], abs=1e-3)


def test_first_polar_level_is_uniform_on_the_circle() -> None:
    found = PolarAngleSamplingStrategy().compute_centroids(3, 128)
    assert found == pytest.approx((np.arange(8) + 0.5) * math.pi / 4)


def test_uniform_levels_are_midpoints() -> None:
    assert UniformStrategy(0, 4).compute_centroids(2, 1).tolist() == [0.5, 1.5, 2.5, 3.5]


@pytest.mark.parametrize("b", [0, 9, True, 2.0])
def test_widths_out_of_range_are_refused(b: int) -> None:
    for name in CodebookRegistry.names():
        with pytest.raises(QuantizerConfigError, match="1 to 8"):
            CodebookRegistry.get(name)().compute_centroids(b, 64)


def test_all_documented_strategies_are_registered() -> None:
    names = {"lloyd_max_gaussian", "lloyd_max_beta", "polar_angle_sampling", "uniform"}
    assert names <= set(CodebookRegistry.names())
