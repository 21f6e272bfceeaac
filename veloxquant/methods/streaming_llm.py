"""streaming_llm: the first tokens and a window of recent ones.

Trained models dump surplus attention on the first tokens; keeping `stream_n_sink` of them beside
the newest `stream_window_size` keeps the perplexity flat at constant memory, and forgets the
middle. The paper numbers positions inside the cache; since rotations compose, that is the same as
turning only the sink keys forward by the number of tokens evicted.
Packed rows (`eviction_storage`) are those of the window; sinks are apart from the first token on,
exact, since they are read turned.
Source: Xiao et al., StreamingLLM, 2023, arXiv 2309.17453, section 3.2. Differs: a chunk of a prompt
sees everything held and itself, then the window closes.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from veloxquant.cache.attend import Fresh, Run
from veloxquant.cache.context import LayerContext
from veloxquant.cache.exact import ExactRows
from veloxquant.cache.rope import shift_positions, shiftable
from veloxquant.cache.store import Store
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.plain import PlainSpec


class StreamingLLMKVCache(ExactRows):
    """Sink rows in a store of their own once the window has moved, window rows in another.

    Beside a packed window sinks are apart from the start.
    """

    constants = frozenset({"rope"})

    def __init__(self, config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> None:
        super().__init__(shape, config.method)
        self.n_sink = config.stream_n_sink
        self.window = config.stream_window_size
        self.rope = context.rope if shiftable(context.rope) else None
        self.sink_keys = Store(codec_for(PlainSpec(), shape.k_dim), max(1, self.n_sink))
        self.sink_values = Store(codec_for(PlainSpec(), shape.v_dim), max(1, self.n_sink))

    def streams(self) -> tuple[Sequence[Store], Sequence[Store]]:
        """Sinks, then the window."""
        return (self.sink_keys, self.key_rows), (self.sink_values, self.value_rows)

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Append rows; the first ones apart where the others are packed."""
        apart = 0 if self.writes_through else self.n_sink - self.sink_keys.length
        if apart:
            self.sink_keys.append(keys[:, :, :apart])
            self.sink_values.append(values[:, :, :apart])
            keys, values = keys[:, :, apart:], values[:, :, apart:]
        super().write(keys, values)

    def drop(self, n: int) -> int:
        """Rewind window rows, then sinks, while nothing was evicted."""
        if self.evicted:
            return 0
        for sinks, rows in (
            (self.sink_keys, self.key_rows),
            (self.sink_values, self.value_rows),
        ):
            sinks.trim(n - rows.trim(n))
        return n

    def settle(self) -> None:
        """Drop the oldest window rows beyond the capacity."""
        self._shrink(self.n_sink + self.window)

    def _shrink(self, capacity: int) -> None:
        surplus = self.rows - capacity
        if surplus <= 0:
            return
        if self.n_sink and not self.sink_keys.length:
            for sink, rows in (
                (self.sink_keys, self.key_rows),
                (self.sink_values, self.value_rows),
            ):
                sink.append(rows.decode(0, self.n_sink, self._dtype))
                rows.drop_front(self.n_sink)
        self.key_rows.drop_front(surplus)
        self.value_rows.drop_front(surplus)
        self.evicted += surplus
        self._unevaluated = list(self.arrays())

    def make_ready(self, n: int) -> None:
        """In decode the oldest row goes before the new one comes, so the budget always holds."""
        super().make_ready(n)
        if n == 1:
            self._shrink(self.n_sink + self.window - 1)

    def runs(self) -> tuple[list[Run], list[Run]]:
        """Stores in token order, the sink keys turned to their place in the cache."""
        keys, values = super().runs()
        if self.rope is not None and self.evicted and self.sink_keys.length:
            sinks = self.sink_keys.decode(0, self.sink_keys.length, self._dtype)
            keys[0] = Fresh(shift_positions(self.rope, sinks, self.evicted))
        return keys, values

    def extra_state(self) -> list[Any]:
        """Tokens evicted so far."""
        return [self.evicted]

    def restore_extra(self, saved: list[Any]) -> None:
        """Take back the counter."""
        self.evicted = int(saved[0])

    # ---- counters of the documents ------------------------------------------------------

    @property
    def stream_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes

    @property
    def streaming_ratio(self) -> float:
        """16-bit bytes of all tokens over the bytes of the rows kept."""
        return self.compression_ratio

    @property
    def tokens_in_window(self) -> int:
        """Rows held that are not sinks."""
        return max(0, self.rows - min(self.n_sink, self.rows))


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> StreamingLLMKVCache:
    """The cache of one layer."""
    return StreamingLLMKVCache(config, shape, context)
