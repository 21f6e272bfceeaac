"""streaming_llm on the keys and values of one head."""

from typing import NamedTuple

import mlx.core as mx

from veloxquant.methods.functional.rows import HALF_BYTES, full_bytes


class StreamingWindow(NamedTuple):
    """First rows (n_sink, D) and newest rows (n_recent, D) of `tokens_seen`."""

    sink_keys: mx.array
    sink_values: mx.array
    recent_keys: mx.array
    recent_values: mx.array
    n_sink: int
    n_recent: int
    tokens_seen: int


def init_streaming_window(n_sink: int, D: int, dtype: mx.Dtype = mx.float16) -> StreamingWindow:
    """An empty window; sinks fill up as tokens come."""
    del n_sink
    none = mx.zeros((0, D), dtype=dtype)
    return StreamingWindow(none, none, none, none, 0, 0, 0)


def stream_update(
    window: StreamingWindow,
    new_keys: mx.array,
    new_values: mx.array,
    n_sink: int,
    window_size: int,
) -> StreamingWindow:
    """The first `n_sink` tokens ever become sinks, later ones a queue of `window_size`."""
    missing = max(0, n_sink - window.n_sink)
    dtype = window.sink_keys.dtype
    parts = []
    for sinks, recent, new in (
        (window.sink_keys, window.recent_keys, new_keys.astype(dtype)),
        (window.sink_values, window.recent_values, new_values.astype(dtype)),
    ):
        first = mx.concatenate([sinks, new[:missing]], axis=0)
        queue = mx.concatenate([recent, new[missing:]], axis=0)
        parts.append((first, queue[max(0, queue.shape[0] - window_size) :]))
    (sink_keys, recent_keys), (sink_values, recent_values) = parts
    return StreamingWindow(
        sink_keys, sink_values, recent_keys, recent_values,
        sink_keys.shape[0], recent_keys.shape[0], window.tokens_seen + new_keys.shape[0],
    )  # fmt: skip


def stream_get_kv(window: StreamingWindow) -> tuple[mx.array, mx.array]:
    """Keys and values (n_sink + n_recent, D), sinks first."""
    keys = mx.concatenate([window.sink_keys, window.recent_keys], axis=0)
    return keys, mx.concatenate([window.sink_values, window.recent_values], axis=0)


def stream_fp16_bytes(window: StreamingWindow) -> int:
    """Bytes of the rows held in 16 bits."""
    keys, values = stream_get_kv(window)
    return HALF_BYTES * (keys.size + values.size)


full_stream_fp16_bytes = full_bytes
