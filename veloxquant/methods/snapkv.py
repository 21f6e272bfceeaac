"""snapkv: the prompt tokens that the last prompt queries attend to.

When a prompt is complete, the attention that its last `snap_obs_window` queries give each earlier
token is summed, smoothed along the sequence (average over 5) and averaged over the query heads of
a KV head; the best rows stay, with the first `snap_n_sink` and the window itself, `snap_budget` in
all. Decoded tokens are appended and never evicted.
Source: Li et al., SnapKV, 2024, arXiv 2404.14469; kernel size of the official code. mlx-lm does not
announce the end of a prompt, so the first single token after a longer block is taken for it.
Without true queries the score is KeyDiff's (arXiv 2504.15364) and the cache says `proxy`.
"""

from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import EvictingCache, Policy
from veloxquant.cache.scorers import WindowAttention
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape

POOL_KERNEL = 5


class SnapKVKVCache(EvictingCache):
    """The prompt is compressed once it is complete."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape) -> None:
        dtype = "float32" if config.snap_dtype == "auto" else config.snap_dtype
        policy = Policy(
            config.snap_budget, config.snap_n_sink, config.snap_obs_window, trigger="prompt_end"
        )
        scorer = WindowAttention(config.snap_obs_window, POOL_KERNEL, dtype=dtype)
        super().__init__(shape, config.method, policy, scorer)

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


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> SnapKVKVCache:
    """The cache of one layer."""
    return SnapKVKVCache(config, shape)
