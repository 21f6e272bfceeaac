"""Greedy water-filling: exact totals, optimal, free of units."""

import itertools

import numpy as np
import pytest

from veloxquant.allocators.water_filling import water_fill_bits


def cost(values, bits):
    return float((values * 4.0 ** -np.asarray(bits, dtype=np.float64)).sum())


def test_the_worked_example():
    assert water_fill_bits([16, 4, 1, 0.25], 4, min_bits=0).tolist() == [3, 1, 0, 0]


def test_the_reference_spectrum():
    share = np.exp(-np.arange(128) / 12)
    share /= share.sum()
    assert cost(share, water_fill_bits(share, 256, 0, 16)) == pytest.approx(0.00424, rel=0.01)
    assert cost(share, np.full(128, 2)) == pytest.approx(0.0625)


@pytest.mark.parametrize("seed", range(5))
def test_no_allocation_of_the_same_total_is_cheaper(seed):
    values = np.random.default_rng(seed).random(5)
    got = water_fill_bits(values, 9, 1, 3)
    assert got.sum() == 9
    best = min(cost(values, b) for b in itertools.product((1, 2, 3), repeat=5) if sum(b) == 9)
    assert cost(values, got) == pytest.approx(best, rel=1e-12)
    for unit in (1e-30, 1e30):
        assert water_fill_bits(values * unit, 9, 1, 3).tolist() == got.tolist()


def test_components_without_variance_come_last_and_equal_ones_share():
    assert water_fill_bits([0, 1, 0], 6, 0, 5).tolist()[1] == 5
    assert water_fill_bits(np.zeros(4), 6).tolist() == [2, 2, 1, 1]
    assert water_fill_bits(np.ones(4), 4 * 8).tolist() == [8] * 4


@pytest.mark.parametrize(
    ("values", "total"), [([1, 2], 1), ([1, 2], 17), ([1, -1], 4), ([np.nan, 1], 4)]
)
def test_impossible_input_is_refused(values, total):
    with pytest.raises(ValueError, match=r"total_bit_budget|eigenvalues"):
        water_fill_bits(values, total)
