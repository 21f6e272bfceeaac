"""Tables of least squared error against the published ones, and what makes them optimal."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest

from veloxquant.math.distributions import beta_pdf, gaussian_pdf, polar_angle_pdf
from veloxquant.math.lloyd_max import embedded_levels, lloyd_max, normal_levels

DISTORTION = {1: 0.36338, 2: 0.11748, 3: 0.034548, 4: 0.009501, 5: 0.002505, 6: 0.000644}
EMBEDDED = {2: 0.1177, 3: 0.0348, 4: 0.00960, 5: 0.00253}
POSITIVE = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1519),
    4: (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
}
NORMAL = NormalDist()


def cells(levels: tuple[float, ...], cuts: tuple[float, ...]) -> list[tuple[float, float, float]]:
    """Level, mass and first moment of each cell under N(0, 1)."""
    edges = (-math.inf, *cuts, math.inf)
    out = []
    for level, a, b in zip(levels, edges, edges[1:], strict=False):
        ends = [0.0 if math.isinf(t) else NORMAL.pdf(t) for t in (a, b)]
        out.append((level, NORMAL.cdf(b) - NORMAL.cdf(a), ends[0] - ends[1]))
    return out


def distortion(levels: tuple[float, ...], cuts: tuple[float, ...]) -> float:
    """E (X - level)² for N(0, 1), exactly."""
    return 1 + sum(c * c * mass - 2 * c * moment for c, mass, moment in cells(levels, cuts))


def middles(levels: tuple[float, ...]) -> tuple[float, ...]:
    return tuple((a + b) / 2 for a, b in itertools.pairwise(levels))


@pytest.mark.parametrize("bits", DISTORTION)
def test_normal_tables(bits: int) -> None:
    levels = normal_levels(bits)
    assert list(levels) == sorted(levels)
    assert all(a == -b for a, b in zip(levels, reversed(levels), strict=True))
    assert distortion(levels, middles(levels)) == pytest.approx(DISTORTION[bits], rel=2e-3)
    for level, mass, moment in cells(levels, middles(levels)):
        assert moment / mass == pytest.approx(level, abs=1e-6)
    for level, wanted in zip(levels[len(levels) // 2 :], POSITIVE.get(bits, ()), strict=False):
        assert level == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("bits", EMBEDDED)
def test_embedded_tables_cost_little_and_nest(bits: int) -> None:
    levels, cuts = embedded_levels(bits)
    assert len(levels) == 1 << bits
    assert list(levels) == sorted(levels)
    assert len(cuts) == (1 << bits) - 1
    assert distortion(levels, cuts) == pytest.approx(EMBEDDED[bits], rel=5e-3)
    assert distortion(levels, cuts) <= 1.013 * DISTORTION[bits]
    # Every second threshold is one of the coarse table: the upper bits are the coarse code.
    assert cuts[1::2] == pytest.approx(middles(normal_levels(bits - 1)))


def test_two_bits_are_two_sign_planes() -> None:
    levels, _ = embedded_levels(2)
    a, b = (levels[3] + levels[2]) / 2, (levels[3] - levels[2]) / 2
    assert (a, b) == pytest.approx((0.9816, 0.5288), abs=1e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_quadrature_agrees_with_the_closed_form(bits: int) -> None:
    levels, edges = lloyd_max(gaussian_pdf, (-8.0, 8.0), 1 << bits)
    assert levels == pytest.approx(normal_levels(bits), abs=2e-3)
    assert edges[0] == -math.inf
    assert edges[-1] == math.inf
    assert edges[1:-1] == pytest.approx((levels[:-1] + levels[1:]) / 2)


@pytest.mark.parametrize(("d", "wanted"), [(128, (0.4525, 1.5052)), (64, (0.4522, 1.50))])
def test_beta_tables_are_near_the_gaussian(d: int, wanted: tuple[float, float]) -> None:
    levels, _ = lloyd_max(lambda x: beta_pdf(x, d), (-1.0, 1.0), 4)
    assert levels[2:] * math.sqrt(d) == pytest.approx(wanted, abs=6e-3)
    assert levels == pytest.approx(-levels[::-1], abs=1e-6)


@pytest.mark.parametrize(
    ("pdf", "low", "high"),
    [
        (gaussian_pdf, -9, 9),
        (lambda x: beta_pdf(x, 3), -1, 1),
        (lambda x: beta_pdf(x, 128), -1, 1),
        (lambda x: beta_pdf(x, 512), -1, 1),
        (lambda x: polar_angle_pdf(x, 1), 0, 2 * math.pi),
        (lambda x: polar_angle_pdf(x, 2), 0, math.pi / 2),
        (lambda x: polar_angle_pdf(x, 9), 0, math.pi / 2),
    ],
)
def test_densities_hold_one(pdf, low: float, high: float) -> None:
    x = np.linspace(low, high, 200_001)
    y = pdf(x)
    assert np.all(np.isfinite(y))
    assert float(np.sum((y[:-1] + y[1:]) / 2) * (x[1] - x[0])) == pytest.approx(1, abs=1e-3)


def test_beta_variance_is_one_over_d() -> None:
    x = np.linspace(-1, 1, 200_001)
    assert float(np.sum(beta_pdf(x, 128) * x * x) * (x[1] - x[0])) == pytest.approx(1 / 128)
