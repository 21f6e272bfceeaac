"""Rows by layer: exact totals, order, ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.allocators.layer_budgets import pyramid_budgets


@given(
    n_layers=st.integers(1, 70),
    room=st.integers(1, 900),
    n_sink=st.integers(0, 9),
    window=st.integers(0, 40),
    beta=st.floats(1, 100),
)
def test_a_pyramid_has_the_mean_and_falls(
    n_layers: int, room: int, n_sink: int, window: int, beta: float
) -> None:
    mean = n_sink + window + room
    budgets = pyramid_budgets(n_layers, mean, n_sink, beta, window)
    assert sum(budgets) == n_layers * mean
    assert budgets == sorted(budgets, reverse=True)
    assert min(budgets) >= n_sink + window
    if n_layers == 1:
        assert budgets == [mean]
    elif (mean - window) / beta >= n_sink:
        low = (mean - window) / beta
        assert abs(budgets[-1] - low - window) <= 1
        assert abs(budgets[0] - (2 * (mean - window) - low) - window) <= 1


def test_the_pyramids_of_the_paper() -> None:
    gentle, steep = pyramid_budgets(32, 512, 0, 2.0), pyramid_budgets(32, 512, 0, 20.0)
    assert (gentle[0], gentle[-1]) == (768, 256)
    assert (steep[0], steep[-1]) == (998, 26)
    assert pyramid_budgets(5, 100, 4, 1.0) == [100] * 5


@pytest.mark.parametrize("bad", [(0, 64, 4, 2.0), (3, 4, 4, 2.0), (3, 64, 4, 0.5)])
def test_what_cannot_be_is_refused(bad: tuple[int, int, int, float]) -> None:
    with pytest.raises(ValueError, match=r"must be|at least"):
        pyramid_budgets(*bad)
