"""Rows by layer: exact totals, order, ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.allocators.layer_budgets import class_budgets, pyramid_budgets, three_classes


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


# ---- classes of layers ----------------------------------------------------------------------

VALUES = [0.9, 0.2, 0.91, 0.5, 0.21, 0.92, 0.52, 0.19]


def test_the_class_of_largest_values_gives_up_rows() -> None:
    budgets = class_budgets(VALUES, 512, 12)
    assert [b < 512 for b in budgets] == [v > 0.8 for v in VALUES]
    assert budgets[0] in (153, 154)
    assert sum(budgets) == 8 * 512
    assert class_budgets(VALUES, 512, 12, 0.0) == [512] * 8


@given(
    values=st.lists(st.floats(0, 1), min_size=1, max_size=40),
    room=st.integers(1, 500),
    least=st.integers(8, 30),
    strength=st.floats(0, 1),
)
def test_classes_keep_the_mean_and_the_order(
    values: list[float], room: int, least: int, strength: float
) -> None:
    budgets = class_budgets(values, least + room, least, strength)
    assert sum(budgets) == len(values) * (least + room)
    assert min(budgets) >= least
    pairs = sorted(zip(values, budgets, strict=True), key=lambda pair: (pair[0], -pair[1]))
    assert [b for _, b in pairs] == sorted(budgets, reverse=True)


@pytest.mark.parametrize("values", [[0.5] * 6, [0.1, 0.9], [0.3], [0.1, 0.1, 0.9, 0.9]])
def test_fewer_than_three_values_change_nothing(values: list[float]) -> None:
    assert class_budgets(values, 100, 12) == [100] * len(values)


def test_classes_do_not_depend_on_scale_and_shift() -> None:
    other = [3.0 * v - 40.0 for v in VALUES]
    assert three_classes(other) == three_classes(VALUES) == [2, 0, 2, 1, 0, 2, 1, 0]
