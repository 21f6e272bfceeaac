"""curdkv: tokens stay by the leverage of their values and of their keys.

The output of attention is made of values, so rows are rated by how much they are needed to span
the others: the leverage of a token's value within the `curdkv_rank_cap` strongest directions of
all values, times that of its key with the position taken off. When a prompt is complete the best
`curdkv_budget` rows stay, the first `curdkv_n_sink` and the newest 16 among them; decoded tokens
are rated with the directions of the prompt and take the place of the lowest row. The next prompt
brings directions of its own.
Source: Sengupta et al., CurDKV, 2025, arXiv 2509.15038. Differs: exact leverages by the Gram matrix
where the paper sketches squared norms with random projections; one budget for all heads; eviction
while decoding. `curdkv_rope_base` is used where the layer's position encoding is unknown.
"""

from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import EvictingCache, Policy
from veloxquant.cache.leverage import ValueLeverage
from veloxquant.config.checks.eviction_pages import CURDKV_RECENT
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.a2ats_rope import PositionCode
from veloxquant.quantizers.sizes import LayerShape


class CurDKVKVCache(EvictingCache):
    """Rows with their leverages."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> None:
        position = PositionCode.of(context.rope, shape.k_dim, config.curdkv_rope_base, None)
        policy = Policy(config.curdkv_budget, config.curdkv_n_sink, CURDKV_RECENT)
        scorer = ValueLeverage(config.curdkv_rank_cap, position)
        super().__init__(shape, config.method, policy, scorer)

    @property
    def curdkv_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> CurDKVKVCache:
    """The cache of one layer.

    Raises:
        QuantizerConfigError: when the rank is more than the channels of a head.
    """
    most = min(shape.k_dim, shape.v_dim)
    if config.curdkv_rank_cap > most:
        raise QuantizerConfigError(
            f"curdkv_rank_cap={config.curdkv_rank_cap} is more than the {most} channels of this "
            f"layer's heads; set it to {most} or less"
        )
    return CurDKVKVCache(config, shape, context)
