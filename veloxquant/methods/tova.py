"""tova: drop what the newest query attends to least.

One list for the whole layer: the attention of the last query, mean over all query heads. Sinks and
recent tokens survive because they are attended to; `tova_n_sink` first rows and the newest are kept
in any case.
Source: Oren et al., TOVA, 2024, arXiv 2401.06104, section 3. Differs: sinks and the newest row are
forced, and a prompt is read whole before its surplus goes. Ties drop the oldest.
Without true queries the score is KeyDiff's (arXiv 2504.15364) and the cache says `proxy`.
"""

from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import EvictingCache, Policy
from veloxquant.cache.scorers import LastQuery
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape


class TOVAKVCache(EvictingCache):
    """Rows at positions that all heads share."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape) -> None:
        policy = Policy(config.tova_budget, config.tova_n_sink, 1, later_wins=True)
        super().__init__(shape, config.method, policy, LastQuery())

    @property
    def tova_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> TOVAKVCache:
    """The cache of one layer."""
    return TOVAKVCache(config, shape)
