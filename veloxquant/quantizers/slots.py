"""A few exact entries of each row: slots of (index, value) beside a coded matrix.

Rows have equally many slots, so that sizes are known beforehand. A matrix is coded as a sum, so
values are differences to what the code gives at their place.
"""

import mlx.core as mx


def extremes(y: mx.array, slots: int) -> mx.array:
    """Indices (..., slots) of the smallest and the largest entries of the last axis, half each."""
    order = mx.argsort(y, axis=-1)
    half = slots // 2
    return mx.concatenate([order[..., :half], order[..., -half:]], axis=-1)


def fill_with_mean(y: mx.array, index: mx.array) -> mx.array:
    """Rows with the entries at `index` replaced by the mean of the others."""
    taken = mx.take_along_axis(y, index, axis=-1)
    others = max(1, y.shape[-1] - index.shape[-1])
    mean = (y.sum(axis=-1, keepdims=True) - taken.sum(axis=-1, keepdims=True)) / others
    return mx.put_along_axis(y, index, mx.broadcast_to(mean, index.shape), axis=-1)


def narrow(index: mx.array, length: int) -> mx.array:
    """Indices into a row of `length` in the smallest type that holds them."""
    return index.astype(mx.uint8 if length <= 256 else mx.uint16)


def gathered(x: mx.array, index: mx.array, value: mx.array) -> mx.array:
    """Products of vectors with sparse rows.

    Args:
        x: (..., M, K).
        index: (..., R, slots), below K.
        value: (..., R, slots).

    Returns:
        (..., M, R) in the type of `x`.
    """
    rows, slots = index.shape[-2:]
    flat = index.astype(mx.uint32).reshape(*index.shape[:-2], 1, rows * slots)
    picked = mx.take_along_axis(x, mx.broadcast_to(flat, (*x.shape[:-1], rows * slots)), axis=-1)
    picked = picked.reshape(*x.shape[:-1], rows, slots)
    return (picked * value.astype(x.dtype)[..., None, :, :]).sum(axis=-1)


def scattered(x: mx.array, index: mx.array, value: mx.array, size: int) -> mx.array:
    """Weighted sums of sparse rows.

    Args:
        x: (..., M, R) weights.
        index: (..., R, slots), below `size`.
        value: (..., R, slots).
        size: length of a row.

    Returns:
        (..., M, size) in the type of `x`.
    """
    *lead, many, rows = x.shape
    slots = index.shape[-1]
    count = 1
    for n in lead:
        count *= n
    parts = x.swapaxes(-1, -2)[..., None, :] * value.astype(x.dtype)[..., None]
    parts = parts.reshape(count, rows * slots, 1, many)
    place = mx.broadcast_to(index.astype(mx.uint32), (*lead, rows, slots))
    place = place.reshape(count, rows * slots)
    out = mx.zeros((count, size, many), dtype=x.dtype)
    out = out.at[mx.arange(count)[:, None], place].add(parts[:, :, 0])
    return out.reshape(*lead, size, many).swapaxes(-1, -2)


def added(rows: mx.array, index: mx.array, value: mx.array) -> mx.array:
    """Dense rows (..., R, size) with the sparse entries added; indices of a row differ."""
    index = index.astype(mx.uint32)
    there = mx.take_along_axis(rows, index, axis=-1)
    return mx.put_along_axis(rows, index, there + value.astype(rows.dtype), axis=-1)
