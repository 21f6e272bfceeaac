"""Sparse slots: products as those of the dense matrix."""

import mlx.core as mx
import numpy as np

from veloxquant.quantizers import slots

KEY = mx.random.key(0)
ROWS = mx.random.normal((2, 3, 40, 24), key=KEY)


def dense(index: mx.array, value: mx.array, size: int) -> mx.array:
    return slots.added(mx.zeros((*index.shape[:-1], size)), index, value)


def test_extremes_are_the_smallest_and_largest_entries() -> None:
    index = np.array(slots.extremes(ROWS, 4))
    order = np.argsort(np.array(ROWS), axis=-1)
    wanted = np.concatenate([order[..., :2], order[..., -2:]], axis=-1)
    np.testing.assert_array_equal(np.sort(index), np.sort(wanted))
    same = slots.extremes(mx.ones((5, 9)), 4)
    assert all(len(set(row)) == 4 for row in same.tolist())


def test_filled_entries_are_the_mean_of_the_others() -> None:
    index = slots.extremes(ROWS, 4)
    filled = np.array(slots.fill_with_mean(ROWS, index))
    rows, places = np.array(ROWS), np.array(index)
    kept = np.ones(rows.shape, bool)
    np.put_along_axis(kept, places, False, axis=-1)
    np.testing.assert_array_equal(filled[kept], rows[kept])
    mean = (rows * kept).sum(-1) / 20
    np.testing.assert_allclose(np.take_along_axis(filled, places, -1)[..., 0], mean, atol=1e-6)


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
