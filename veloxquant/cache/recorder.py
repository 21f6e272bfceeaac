"""A plain cache that remembers what a model gave it and asked of it: the probe's eyes."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from veloxquant.cache.batch import RowBatch
from veloxquant.cache.view import AttentionCall, CacheView


class Recorder:
    """Exact rows, handed out as views or as arrays.

    After a forward pass `rows` holds what was given, `n_q_heads` is known if attention came through
    the hook, `array_mask` and `window` say what masks the model asked for.
    """

    def __init__(self, *, views: bool, mask_axes: int = 4) -> None:
        self.views = views
        self.mask_axes = mask_axes
        self.offset = 0
        self.rows: tuple[mx.array, mx.array] | None = None
        self.n_q_heads: int | None = None
        self.array_mask = False
        self.window: int | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append (B, H, L, D) and return views or arrays of everything."""
        if self.rows is not None:
            old_keys, old_values = self.rows
            keys = mx.concatenate([old_keys, keys], axis=2)
            values = mx.concatenate([old_values, values], axis=2)
        self.rows = (keys, values)
        self.offset = keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """What was appended so far."""
        assert self.rows is not None
        keys, values = self.rows
        if not self.views:
            return keys, values
        return (
            CacheView(self, keys.shape, keys.dtype, is_key=True, own=True),
            CacheView(self, values.shape, values.dtype, is_key=False, own=True),
        )

    def attend(self, call: AttentionCall) -> mx.array:
        """Exact attention, noting the number of query heads."""
        assert self.rows is not None
        self.n_q_heads = call.queries.shape[1]
        keys, values = self.rows
        return mx.fast.scaled_dot_product_attention(
            call.queries, keys, values, scale=call.scale, mask=call.mask, sinks=call.sinks
        )

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Any:
        """The mask of a plain cache; notes whether the model wants an array."""
        self.array_mask |= return_array
        self.window = window_size or self.window
        if N == 1 and window_size is None:
            return None
        if not return_array and window_size is None:
            return "causal"
        rows = mx.arange(self.offset, self.offset + N)[:, None]
        columns = mx.arange(self.offset + N)[None]
        mask = rows >= columns
        return mask if window_size is None else mask & (rows < columns + window_size)

    # ---- what a batch asks of its rows ------------------------------------------------------

    @property
    def batch_views(self) -> bool:
        """Whether a batch hands out views."""
        return self.views

    def commit(self) -> None:
        """Nothing waits."""

    def make_ready(self, n: int) -> None:
        """Room is made when rows arrive."""

    def size(self) -> int:
        """Tokens held."""
        return self.offset

    @property
    def state(self) -> list[mx.array]:
        """The rows."""
        return list(self.rows or ())

    @staticmethod
    def merge(caches: Sequence[Any]) -> RowBatch:
        """A batch of recorders."""
        return RowBatch(caches)
