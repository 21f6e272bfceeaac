"""knorm: keys of small norm attract attention, so they stay.

No queries and no state: the score of a row is minus the length of its key (plus, for the ablation
`knorm_keep="high"`), which rotation does not change. The score never changes either, so dropping
rows after every chunk leaves the same ones as dropping once at the end. With `knorm_recent=0` the
newest row may go as soon as it was attended to. Ties keep the later row.
Source: Devoto et al., 2024, arXiv 2406.11430, section 4. Differs: sinks and an optional recent
window are kept; no layer is left out.
"""

from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import EvictingCache, Policy
from veloxquant.cache.scorers import KeyNorm
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape


class L2NormKVCache(EvictingCache):
    """Rows with their scores."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape) -> None:
        policy = Policy(
            config.knorm_budget, config.knorm_n_sink, config.knorm_recent, later_wins=True
        )
        super().__init__(shape, config.method, policy, KeyNorm(low=config.knorm_keep == "low"))

    @property
    def knorm_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> L2NormKVCache:
    """The cache of one layer."""
    return L2NormKVCache(config, shape)
