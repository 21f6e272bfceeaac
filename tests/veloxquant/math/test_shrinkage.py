"""Shrunk variances: close to what new rows show, free of units, nothing lost."""

import numpy as np
import pytest

from veloxquant.math.shrinkage import future_variances


def sample(spectrum: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Variances of a sample along its own eigenvectors, and of new rows along them."""
    draw = np.random.default_rng(3)
    x, later = (draw.standard_normal((n, len(spectrum))) * np.sqrt(spectrum) for n in (rows, 9_000))
    values, vectors = np.linalg.eigh(x.T @ x / rows)
    return values, np.square(later @ vectors).mean(axis=0)


@pytest.mark.parametrize("rows", [60, 128, 256])
@pytest.mark.parametrize("decay", [0.0, 1 / 30])
def test_new_rows_show_what_was_predicted(rows: int, decay: float) -> None:
    values, true = sample(np.exp(-decay * np.arange(96)), rows)
    got = future_variances(values, rows)
    assert got.sum() == pytest.approx(values.sum())
    assert np.abs(got - true).mean() < 0.5 * np.abs(values - true).mean()
    # The grids of a quantizer are relative to the variances.
    assert np.abs(np.log(got / true)).max() < 0.8


def test_units_order_and_batches_make_no_difference() -> None:
    values = np.stack([sample(np.exp(-np.arange(20) / 5), n)[0] for n in (40, 50)])
    got = future_variances(values, 40)
    np.testing.assert_allclose(future_variances(values * 1e-20, 40), got * 1e-20)
    np.testing.assert_allclose(future_variances(values[:, ::-1], 40), got[:, ::-1])
    np.testing.assert_allclose(future_variances(values[1], 40), got[1])


def test_no_variance_stays_none() -> None:
    assert not future_variances(np.zeros((2, 8)), 30).any()
    lone = future_variances(np.array([0.0, 0, 0, 1]), 30)
    assert np.isfinite(lone).all()
    assert lone[-1] == pytest.approx(1, rel=1e-6)
