"""morphkv: older tokens stay by how strongly the newest queries attend to them now.

The last `morphkv_window` queries are kept. Their logits with each row are summed over the query
heads of a KV head; each query's softmax over the older rows alone (neither sinks nor the newest
window + 1) is summed over the window, and the best older rows stay.
Source: Ghadia et al., MorphKV, 2025, arXiv 2503.00979, section 3; sum fusion and the summed logits
are those of the official code. Differs: `morphkv_n_sink` first rows stay, everything counts into
the budget, and logits are computed anew from the queries instead of being stored.
Without true queries the score is KeyDiff's (arXiv 2504.15364) and the cache says `proxy`.
"""

from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import EvictingCache, Policy
from veloxquant.cache.scorers import WindowLogits
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape


class MorphKVKVCache(EvictingCache):
    """Rows and the newest queries."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape) -> None:
        n_sink, window = config.morphkv_n_sink, config.morphkv_window
        policy = Policy(config.morphkv_budget, n_sink, window + 1, later_wins=True)
        scorer = WindowLogits(window, n_sink, window + 1)
        super().__init__(shape, config.method, policy, scorer)

    @property
    def morphkv_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> MorphKVKVCache:
    """The cache of one layer."""
    return MorphKVKVCache(config, shape)
