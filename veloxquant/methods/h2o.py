"""h2o: the tokens that collected most attention so far, and the newest ones.

Each stored token keeps the sum of the attention it was given, decayed by `h2o_decay` per query; the
lowest sums go once there are more than `h2o_budget` rows, never the first `h2o_n_sink` or the
newest `h2o_grace`. The score of a KV head is the mean over its query heads.
Source: Zhang et al., H2O, 2023, arXiv 2306.14048, section 4. Differs: a short grace window and a
decay where the paper keeps budget/2 recent tokens and decays nothing (set `h2o_grace` and
`h2o_decay=1.0` for that); a prompt is read whole before its surplus goes.
Without true queries the score is KeyDiff's (arXiv 2504.15364) and the cache says `proxy`.
"""

from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import EvictingCache, Policy
from veloxquant.cache.scorers import CumulativeAttention
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape


class H2OKVCache(EvictingCache):
    """Rows with the attention they collected."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape) -> None:
        policy = Policy(config.h2o_budget, config.h2o_n_sink, config.h2o_grace, later_wins=True)
        scorer = CumulativeAttention(decay=config.h2o_decay)
        super().__init__(shape, config.method, policy, scorer)

    @property
    def h2o_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> H2OKVCache:
    """The cache of one layer."""
    return H2OKVCache(config, shape)
