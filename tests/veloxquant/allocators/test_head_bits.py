"""Bits by head: optimal under the model, fair to equal heads, exact in their sum."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.allocators.head_bits import allocate_head_bits, allocate_units

CHOICES = (2, 3, 4)


def units(weights: list[float], budget: int, beta: float = 3.5) -> list[int]:
    found = allocate_units(mx.array(weights), mx.array(budget), CHOICES, 1, beta)
    return np.array(found).tolist()


def cost(weights: np.ndarray, bits: np.ndarray, beta: float = 3.5) -> float:
    return float((weights * beta ** -bits.astype(float)).sum())


def test_the_worked_example() -> None:
    assert units([1, 3, 9, 27], 2) == [0, 0, 1, 1]
    assert cost(np.array([1, 3, 9, 27]), np.array([2, 2, 3, 3])) == pytest.approx(1.1662, rel=1e-3)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 32])
def test_the_sum_is_the_budget(heads: int) -> None:
    draw = np.random.default_rng(heads)
    for budget in range(2 * heads + 1):
        assert sum(units(draw.lognormal(size=heads).tolist(), budget)) == budget


def test_no_other_choice_is_better() -> None:
    draw = np.random.default_rng(0)
    every = np.array(list(itertools.product(CHOICES, repeat=8)))
    sums = every.sum(axis=1)
    for _ in range(50):
        weights = draw.lognormal(sigma=2, size=8)
        budget = int(draw.integers(0, 17))
        best = min(cost(weights, bits) for bits in every[sums == 16 + budget])
        got = cost(weights, 2 + np.array(units(weights.tolist(), budget)))
        assert got <= 1.01 * best


def test_more_important_heads_never_get_less_and_order_follows_them() -> None:
    draw = np.random.default_rng(1)
    weights = draw.lognormal(sigma=1.5, size=16)
    got = np.array(units(weights.tolist(), 13))
    assert (np.diff(got[np.argsort(weights)]) >= 0).all()
    mixed = draw.permutation(16)
    assert (np.array(units(weights[mixed].tolist(), 13)) == got[mixed]).all()
    assert units([1.0] * 6, 4) == [1, 1, 1, 1, 0, 0]
    assert units([0.0] * 4, 5) == [2, 1, 1, 1]


def test_uneven_steps_stay_within_the_budget() -> None:
    draw = np.random.default_rng(2)
    for budget in range(25):
        weights = mx.array(draw.lognormal(size=8).astype(np.float32))
        found = np.array(allocate_units(weights, mx.array(budget), (2, 4, 8), 2))
        assert set(found.tolist()) <= {0, 1, 3}
        assert budget - 2 <= found.sum() <= budget


def test_weighted_error_is_well_below_that_of_a_uniform_width() -> None:
    """Weights over a factor of ten, the measured errors of 2, 3 and 4 bits."""
    draw, error = np.random.default_rng(3), np.array([0.154, 0.0281, 0.0061])
    ours, uniform = 0.0, 0.0
    for _ in range(50):
        weights = 10 ** draw.uniform(0, 1, size=8)
        ours += (weights * error[units(weights.tolist(), 4, 5.0)]).sum()
        uniform += (weights * draw.permutation([0.154] * 4 + [0.0281] * 4)).sum()
    assert ours <= 0.85 * uniform


# ---- as documented --------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("target", [2.25, 2.5, 3.0, 3.75])
def test_the_mean_is_the_target(heads: int, target: float) -> None:
    importance = np.random.default_rng(heads).normal(size=heads)
    bits = allocate_head_bits(importance, target, CHOICES, heads)
    assert set(bits) <= set(CHOICES)
    assert sum(bits) == round(target * heads)


def test_only_the_order_matters() -> None:
    calm = allocate_head_bits([1, 2, 3, 4, 5, 6, 7, 8], 2.5, CHOICES, 8)
    wild = allocate_head_bits([-1e9, 0, 1e-9, 1, 5, 1e3, 1e6, 1e30], 2.5, CHOICES, 8)
    assert calm == wild == sorted(calm)
    assert allocate_head_bits(mx.arange(8), 2.5, CHOICES, 8) == calm
    assert allocate_head_bits([8, 7, 6, 5, 4, 3, 2, 1], 2.5, CHOICES, 8) == calm[::-1]


def test_equal_heads_get_equal_bits() -> None:
    assert allocate_head_bits([3.0] * 8, 2.5, CHOICES, 8) == [2] * 8
    assert allocate_head_bits([3.0] * 8, 3.5, CHOICES, 8) == [3] * 8
    some = allocate_head_bits([1, 5, 5, 1, 5, 1], 2.5, CHOICES, 6)
    assert some == [2, 3, 3, 2, 3, 2]


def test_a_target_without_a_choice_is_told() -> None:
    with pytest.warns(UserWarning, match="end of allowed_bits"):
        assert allocate_head_bits([1, 2], 2.0, CHOICES, 2) == [2, 2]
    assert allocate_head_bits([1, 2], 4.0, CHOICES, 2, warn_degenerate=False) == [4, 4]


@pytest.mark.parametrize(
    ("importance", "target", "told"),
    [
        ([1, 2], 2.5, "3 heads"),
        ([1, 2, np.nan], 2.5, "finite"),
        ([1, 2, 3], 5, "target_avg_bits=5"),
    ],
)
def test_what_is_refused(importance: list[float], target: float, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        allocate_head_bits(importance, target, CHOICES, 3)
