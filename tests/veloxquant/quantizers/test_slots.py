"""Sparse slots: products as those of the dense matrix."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.quantizers import slots
from veloxquant.quantizers.sparse import corrected

KEY = mx.random.key(0)
ROWS = mx.random.normal((2, 3, 40, 24), key=KEY)


def dense(at: mx.array, value: mx.array, size: int) -> mx.array:
    return corrected(mx.zeros((*at.shape[:-1], size)), at.astype(mx.uint32), value)


def test_extremes_are_the_smallest_and_largest_entries() -> None:
    at = np.array(slots.extremes(ROWS, 4))
    order = np.argsort(np.array(ROWS), axis=-1)
    wanted = np.concatenate([order[..., :2], order[..., -2:]], axis=-1)
    np.testing.assert_array_equal(np.sort(at), np.sort(wanted))
    same = slots.extremes(mx.ones((5, 9)), 4)
    assert all(len(set(row)) == 4 for row in same.tolist())


def test_a_loud_channel_is_no_outlier_but_a_loud_entry_is() -> None:
    loud = ROWS * mx.where(mx.arange(24) == 5, 1e20, 1.0)
    at = np.array(slots.farthest(loud, 2, 20))
    np.testing.assert_array_equal(at, np.array(slots.farthest(ROWS, 2, 20)))
    spike = mx.where((mx.arange(40)[:, None] == 7) & (mx.arange(24) == 9), 50.0, ROWS)
    assert (np.array(slots.farthest(spike, 1, 40))[:, :, 7, 0] == 9).all()


@pytest.mark.parametrize("span", [1, 20])
def test_filled_entries_are_the_mean_of_the_others(span: int) -> None:
    at = slots.extremes(ROWS, 4)
    got, rows, places = (np.array(a) for a in (slots.filled(ROWS, at, span), ROWS, at))
    kept = np.ones(rows.shape, bool)
    np.put_along_axis(kept, places, False, axis=-1)
    np.testing.assert_array_equal(got[kept], rows[kept])
    rows, kept, got = (a.reshape(2, 3, 40 // span, span, 24) for a in (rows, kept, got))
    axis = -1 if span == 1 else 3
    mean = (rows * kept).sum(axis, keepdims=True) / kept.sum(axis, keepdims=True).clip(min=1)
    np.testing.assert_allclose(got[~kept], np.broadcast_to(mean, got.shape)[~kept], atol=1e-6)


def test_products_are_those_of_the_dense_matrix() -> None:
    index = slots.narrow(slots.extremes(ROWS, 6), 24)
    assert index.dtype == mx.uint8
    assert slots.narrow(index, 300).dtype == mx.uint16
    value = mx.random.normal(index.shape, key=mx.random.key(1))
    matrix = dense(index, value, 24)
    x = mx.random.normal((2, 3, 5, 24), key=mx.random.key(2))
    w = mx.random.normal((2, 3, 5, 40), key=mx.random.key(3))
    got = slots.gathered(x, index, value)
    np.testing.assert_allclose(np.array(got), np.array(x @ matrix.swapaxes(-1, -2)), atol=1e-5)
    got = slots.scattered(w, index, value, 24)
    np.testing.assert_allclose(np.array(got), np.array(w @ matrix), atol=1e-5)
