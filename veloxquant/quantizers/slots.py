"""Products with rows that have a few entries in slots, and how those entries are picked.

Rows have equally many slots, so that sizes are known beforehand; `quantizers/sparse.py` says what
the slots hold.
"""

import mlx.core as mx

from veloxquant.quantizers.sparse import largest

_TINY = 1e-30


def extremes(x: mx.array, slots: int) -> mx.array:
    """Places (..., slots) of the smallest and the largest entries of the last axis, half each."""
    half = slots // 2
    high = mx.argpartition(-x, half - 1, axis=-1)[..., :half]
    # What was taken must not be taken again, which equal entries would allow.
    rest = mx.put_along_axis(x, high, mx.array(mx.inf, dtype=x.dtype), axis=-1)
    low = mx.argpartition(rest, half - 1, axis=-1)[..., :half]
    return mx.concatenate([low, high], axis=-1)


def farthest(x: mx.array, slots: int, span: int) -> mx.array:
    """Channels (B, H, T, slots) in which a token is most unlike its `span` neighbours.

    Deviations count in standard deviations of their channel, so a loud channel is no outlier.
    """
    batch, heads, tokens, dim = x.shape
    blocks = x.reshape(batch, heads, tokens // span, span, dim)
    away = mx.abs(blocks - blocks.mean(axis=3, keepdims=True))
    peak = mx.maximum(away.max(axis=3, keepdims=True), _TINY)
    away = away / peak
    spread = mx.sqrt(mx.square(away).mean(axis=3, keepdims=True))
    return largest((away / mx.maximum(spread, _TINY)).reshape(x.shape), slots)


def filled(x: mx.array, at: mx.array, span: int) -> mx.array:
    """Rows whose entries at channels `at` are the mean of the others.

    Of the others of the token when `span` is 1, else of the channel in groups of `span` tokens.
    """
    batch, heads, tokens, dim = x.shape
    marks = mx.put_along_axis(mx.zeros(x.shape), at, mx.array(1.0), axis=-1)
    axis = -1 if span == 1 else 3
    shape = x.shape if span == 1 else (batch, heads, tokens // span, span, dim)
    rows, taken = x.reshape(shape), marks.reshape(shape)
    others = mx.maximum((1 - taken).sum(axis=axis, keepdims=True), 1)
    mean = (rows * (1 - taken)).sum(axis=axis, keepdims=True) / others
    return mx.where(taken > 0, mean, rows).reshape(x.shape)


def narrow(at: mx.array, length: int) -> mx.array:
    """Places in a row of `length` in the smallest type that holds them."""
    return at.astype(mx.uint8 if length <= 256 else mx.uint16)


def gathered(x: mx.array, at: mx.array, value: mx.array) -> mx.array:
    """Products of vectors with sparse rows.

    Args:
        x: (..., M, K).
        at: (..., R, slots), below K.
        value: (..., R, slots).

    Returns:
        (..., M, R) in the type of `x`.
    """
    rows, slots = at.shape[-2:]
    flat = at.astype(mx.uint32).reshape(*at.shape[:-2], 1, rows * slots)
    picked = mx.take_along_axis(x, mx.broadcast_to(flat, (*x.shape[:-1], rows * slots)), axis=-1)
    picked = picked.reshape(*x.shape[:-1], rows, slots)
    return (picked * value.astype(x.dtype)[..., None, :, :]).sum(axis=-1)


def scattered(x: mx.array, at: mx.array, value: mx.array, size: int) -> mx.array:
    """Weighted sums of sparse rows.

    Args:
        x: (..., M, R) weights.
        at: (..., R, slots), below `size`.
        value: (..., R, slots).
        size: length of a row.

    Returns:
        (..., M, size) in the type of `x`.
    """
    *lead, many, rows = x.shape
    slots = at.shape[-1]
    count = 1
    for n in lead:
        count *= n
    parts = x.swapaxes(-1, -2)[..., None, :] * value.astype(x.dtype)[..., None]
    parts = parts.reshape(count, rows * slots, 1, many)
    place = at.astype(mx.uint32).reshape(count, rows * slots)
    out = mx.zeros((count, size, many), dtype=x.dtype)
    out = out.at[mx.arange(count)[:, None], place].add(parts[:, :, 0])
    return out.reshape(*lead, size, many).swapaxes(-1, -2)
