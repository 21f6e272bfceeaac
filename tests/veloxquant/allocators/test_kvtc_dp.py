"""Allocation by dynamic programming: against brute force, and what must hold for any input."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.allocators.kvtc_dp import (
    BIT_CHOICES,
    allocate_exactly,
    dp_allocate_bits,
    expected_distortion,
)
from veloxquant.allocators.water_filling import water_fill_bits

EXAMPLE = np.array([16.0, 4.0, 1.0, 0.25])
DECAY = np.exp(-np.arange(128) / 12)
variances = st.lists(st.just(0.0) | st.floats(1e-6, 1e3), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("budget", "bits", "cost"),
    [(4, (3, 1, 0, 0), 2.7660), (6, (3, 2, 1, 0), 1.2354), (8, (4, 3, 1, 0), 0.7356)],
)
def test_worked_examples(budget, bits, cost):
    got = dp_allocate_bits(EXAMPLE, budget)
    assert tuple(got) == bits
    assert expected_distortion(EXAMPLE, got) == pytest.approx(cost, abs=5e-5)


@settings(deadline=None, max_examples=40)
@given(variances, st.integers(0, 12), st.sampled_from([BIT_CHOICES, (0, 2, 3), (1, 4), (0, 5)]))
def test_no_allocation_is_cheaper(values, budget, choices):
    rows = np.array(values)
    if budget < len(rows) * choices[0]:
        with pytest.raises(ValueError, match="total_bit_budget"):
            dp_allocate_bits(rows, budget, choices)
        return
    got = dp_allocate_bits(rows, budget, choices)
    assert set(got.tolist()) <= set(choices)
    assert got.sum() <= budget
    best = min(
        expected_distortion(rows, np.array(bits))
        for bits in itertools.product(choices, repeat=len(rows))
        if sum(bits) <= budget
    )
    assert expected_distortion(rows, got) == pytest.approx(best, rel=1e-12, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(variances, st.integers(0, 30), st.sampled_from([1e-9, 7.0, 1e9]), st.integers(0, 99))
def test_only_ratios_count_and_more_variance_never_gets_fewer_bits(values, budget, unit, seed):
    rows = np.array(values)
    got = dp_allocate_bits(rows, budget)
    np.testing.assert_array_equal(dp_allocate_bits(rows * unit, budget), got)
    order = np.random.default_rng(seed).permutation(len(rows))
    for i, j in itertools.product(range(len(rows)), repeat=2):
        if rows[i] > rows[j]:
            assert got[i] >= got[j]
    again = dp_allocate_bits(rows[order], budget)
    assert expected_distortion(rows[order], again) == pytest.approx(
        expected_distortion(rows, got), abs=1e-9
    )


def test_a_larger_budget_never_costs_more():
    costs = [expected_distortion(DECAY, dp_allocate_bits(DECAY, b)) for b in range(0, 400, 37)]
    assert costs == sorted(costs, reverse=True)


def test_the_reference_spectrum():
    share = DECAY / DECAY.sum()
    bits = dp_allocate_bits(share, 256)
    assert tuple(bits[:15]) == (6,) * 14 + (4,)
    assert expected_distortion(share, bits) == pytest.approx(0.00620, rel=0.01)


def test_as_good_as_greedy_filling_where_that_is_optimal():
    rows = np.random.default_rng(1).random(12)
    greedy = water_fill_bits(rows, 30, 0, 8)
    exact = dp_allocate_bits(rows, 30, range(9), beta=4.0)
    assert expected_distortion(rows, exact, 4.0) == pytest.approx(
        expected_distortion(rows, greedy, 4.0), abs=1e-12
    )


def test_edges():
    assert dp_allocate_bits(EXAMPLE, 0).tolist() == [0, 0, 0, 0]
    assert dp_allocate_bits(EXAMPLE, 999).tolist() == [8, 8, 8, 8]
    assert dp_allocate_bits(np.zeros(4), 9).tolist() == [0, 0, 0, 0]
    assert set(dp_allocate_bits(np.ones(6), 8).tolist()) == {1, 2}
    given = EXAMPLE.copy()
    dp_allocate_bits(given, 4)
    np.testing.assert_array_equal(given, EXAMPLE)


def test_many_heads_at_once_equal_each_alone():
    rows = np.random.default_rng(2).random((2, 3, 20))
    together = dp_allocate_bits(rows, 40)
    for i, j in itertools.product(range(2), range(3)):
        np.testing.assert_array_equal(together[i, j], dp_allocate_bits(rows[i, j], 40))


@pytest.mark.parametrize(
    "call",
    [
        lambda: dp_allocate_bits(np.array([1.0, np.nan]), 4),
        lambda: dp_allocate_bits(np.array([1.0, -1.0]), 4),
        lambda: dp_allocate_bits(EXAMPLE, 4, (0, 2, 1)),
        lambda: dp_allocate_bits(EXAMPLE, 4, beta=1.0),
        lambda: dp_allocate_bits(EXAMPLE, -1),
    ],
)
def test_impossible_input_is_refused(call):
    with pytest.raises(ValueError, match=r"variances|bit_choices|beta|total_bit_budget"):
        call()


def test_an_exact_sum_is_spent_or_the_nearest_below():
    assert allocate_exactly(np.zeros(3) + 1e-9, 7, (1, 2, 3), 3.5).sum() == 7
    assert allocate_exactly(np.ones(3), 7, (2, 4), 3.5).sum() == 6
