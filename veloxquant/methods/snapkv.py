"""snapkv: the prompt tokens that the last prompt queries attend to.

When a prompt is complete, the attention that its last `snap_obs_window` queries give each earlier
token is summed, smoothed along the sequence (average over 5) and averaged over the query heads of
a KV head; the best rows stay, with the first `snap_n_sink` and the window itself, `snap_budget` in
all. Decoded tokens are appended and never evicted.
Source: Li et al., SnapKV, 2024, arXiv 2404.14469; kernel size of the official code. mlx-lm does not
announce the end of a prompt, so the first single token after a longer block is taken for it.
Without true queries the score is KeyDiff's (arXiv 2504.15364) and the cache says `proxy`.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from veloxquant.cache.context import LayerContext
from veloxquant.cache.exact import ExactRows
from veloxquant.cache.scorers import WindowAttention, key_difference
from veloxquant.cache.selection import select_rows
from veloxquant.cache.store import Store
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.sizes import WINDOW_STEP, LayerShape
from veloxquant.quantizers.specs.plain import PlainSpec

POOL_KERNEL = 5


class SnapKVKVCache(ExactRows):
    """Exact rows and their positions; the prompt is compressed once it is complete."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape) -> None:
        super().__init__(shape, config.method)
        self.budget = config.snap_budget
        self.n_sink = config.snap_n_sink
        self.obs_window = config.snap_obs_window
        dtype = None if config.snap_dtype == "auto" else getattr(mx, config.snap_dtype)
        self.scorer = WindowAttention(self.obs_window, POOL_KERNEL, dtype)
        self.positions = Store(codec_for(PlainSpec(), 1), WINDOW_STEP)
        self.since_eviction = 0
        self._in_prompt = False
        self._due = False

    # ---- tokens in ----------------------------------------------------------------------

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Append rows and their absolute positions, and watch for the end of the prompt."""
        super().write(keys, values)
        batch, heads, n, _ = keys.shape
        start = self.offset - n
        places = mx.arange(start, start + n, dtype=mx.int32)[None, None, :, None]
        self.positions.append(mx.broadcast_to(places, (batch, heads, n, 1)))
        self.since_eviction += n
        if n > 1:
            self._in_prompt = True
        elif self._in_prompt:
            self._in_prompt, self._due = False, True

    def observe(self, queries: mx.array, scale: float) -> None:
        """Collect queries while a prompt is read."""
        if self._in_prompt or self._due:
            self.scorer.observe(queries, scale)
            self._unevaluated.extend(self.scorer.arrays())

    def settle(self) -> None:
        """Compress a completed prompt that is over the budget."""
        if not self._due:
            return
        self._due = False
        if self.rows > self.budget:
            keys = self.key_rows.decode(0, self.rows, self._dtype)
            seen = self.scorer.queries is not None
            self.fidelity = "exact" if seen else "proxy"
            scores = self.scorer.score(keys) if seen else key_difference(keys)
            keep = select_rows(scores, self.budget, self.n_sink, self.obs_window)
            self.evicted += self.rows - self.budget
            for store in (self.key_rows, self.value_rows, self.positions):
                store.take(keep)
            self.since_eviction = 0
            self._unevaluated = list(self.arrays())
        self.scorer.forget()

    def drop(self, n: int) -> int:
        """Rewind exactly: anything before an eviction, later only rows appended since."""
        if self.evicted and n > self.since_eviction:
            return 0
        for store in (self.key_rows, self.value_rows, self.positions):
            store.trim(n)
        self.since_eviction -= n
        if self.scorer.queries is not None:
            have = self.scorer.queries.shape[2]
            self.scorer.queries = self.scorer.queries[:, :, : have - n] if have > n else None
        return n

    # ---- state --------------------------------------------------------------------------

    def extra_arrays(self) -> Iterator[mx.array]:
        """Positions and the ring of queries."""
        yield from self.positions.arrays()
        yield from self.scorer.arrays()

    def extra_state(self) -> list[Any]:
        """Counters, the state of the prompt, and queries."""
        return [
            self.evicted, self.since_eviction, self._in_prompt, self._due, self.scorer.saved(),
        ]  # fmt: skip

    def restore_extra(self, saved: list[Any]) -> None:
        """Take back what `extra_state` gave."""
        self.evicted, self.since_eviction = int(saved[0]), int(saved[1])
        self._in_prompt, self._due = bool(saved[2]), bool(saved[3])
        self.scorer.restore(saved[4])

    def kept_positions(self) -> mx.array:
        """Absolute positions of the rows held, (B, H, n) int32 ascending."""
        return self.positions.decode(0, self.positions.length, mx.int32)[..., 0]

    # ---- counters of the documents ------------------------------------------------------

    @property
    def tokens_total(self) -> int:
        """Tokens seen."""
        return self.offset

    @property
    def keep_rate(self) -> float:
        """Rows held over tokens seen; 1.0 while empty."""
        return self.rows / self.offset if self.offset else 1.0

    @property
    def eviction_ratio(self) -> float:
        """Share of tokens given up."""
        return 1.0 - self.keep_rate

    @property
    def full_key_bytes(self) -> int:
        """Bytes that all keys would take."""
        return self._bytes(self.offset, key=True)

    @property
    def full_value_bytes(self) -> int:
        """Bytes that all values would take."""
        return self._bytes(self.offset, key=False)

    @property
    def evicted_key_bytes(self) -> int:
        """Bytes of the keys given up."""
        return self._bytes(self.offset - self.rows, key=True)

    @property
    def evicted_value_bytes(self) -> int:
        """Bytes of the values given up."""
        return self._bytes(self.offset - self.rows, key=False)

    def _bytes(self, tokens: int, *, key: bool) -> int:
        if self._shape is None:
            return 0
        batch, heads, k_dim, v_dim = self._shape
        return batch * heads * tokens * (k_dim if key else v_dim) * self._dtype.size

    def layout(self) -> list[Store]:
        """Keys, values and positions."""
        return [self.key_rows, self.value_rows, self.positions]


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> SnapKVKVCache:
    """The cache of one layer."""
    return SnapKVKVCache(config, shape)
