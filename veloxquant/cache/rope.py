"""Turning stored keys to other positions with the layer's own position encoding."""

from typing import Any

import mlx.core as mx


def shiftable(rope: Any | None) -> bool:
    """Whether the encoding is a pure rotation: its calls compose, `R(a)·R(b) = R(a + b)`.

    Encodings that also scale the vector (YaRN, LongRoPE) or switch frequencies by length are not.
    """
    if rope is None:
        return False
    return type(rope).__name__ in {"RoPE", "Llama3RoPE"} and callable(rope)


def shift_positions(rope: Any, keys: mx.array, by: int) -> mx.array:
    """Keys (B, H, n, D) turned forward by `by` positions, all by the same angle."""
    batch, heads, n, dim = keys.shape
    # One token a row, so that the encoding's own offset is the whole shift.
    rows = keys.reshape(batch * heads * n, 1, 1, dim)
    return rope(rows, offset=by).reshape(batch, heads, n, dim)


def turn_rows(rope: Any, keys: mx.array, by: mx.array) -> mx.array:
    """Keys (B, H, n, D), each turned by its own number of positions (B, H, n) int32."""
    shape = keys.shape
    return rope(keys.reshape(-1, 1, 1, shape[-1]), offset=by.reshape(-1)).reshape(shape)


def turned_back(
    rope: Any, keys: mx.array, first: int, positions: mx.array | None = None
) -> mx.array:
    """Keys (B, H, n, D) as they were before their position was encoded.

    They are at positions `first` and on, or at `positions` (n,) int32.
    """
    if positions is not None:
        return turn_rows(rope, keys, mx.broadcast_to(-positions, keys.shape[:3]))
    # In reverse order the positions from -last on are each key's own, negated.
    last = first + keys.shape[2] - 1
    return rope(keys[:, :, ::-1], offset=-last)[:, :, ::-1]
