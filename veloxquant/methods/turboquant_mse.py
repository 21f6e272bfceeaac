"""turboquant_mse: rotate, normalise, code each coordinate with the Lloyd–Max table.

After a random rotation every coordinate of a unit vector follows one known law, so that one table
serves every head, layer and model. Every token is coded alone when it arrives, keys and values
alike. Keys carry the norm that leaves inner products unbiased, values that of least squared error.
Source: TurboQuant, Zandieh et al., 2025, arXiv 2504.19874. Differs: the rotation is two rounds of a
randomized Hadamard transform unless a store gives a matrix; with loud channels apart the first
`n_calib_tokens` wait exact until the channels are known, and are then coded like the rest; cut
back below that number, they come back as they were coded.
"""

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.rotated import turboquant_mse_plan, turboquant_prod_plan
from veloxquant.cache.standalone import StandaloneCache, layer_of, refuse_standalone_settings
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape


class TurboQuantKVCache(StandaloneCache):
    """One head in turboquant_mse or turboquant_prod, fed vector by vector."""

    def make_layer(self, config: KVCacheConfig, shape: LayerShape) -> ComposedCache:
        """The streams of the configured method."""
        is_mse = config.method == "turboquant_mse"
        plan = turboquant_mse_plan(config) if is_mse else turboquant_prod_plan(config)
        return layer_of(config, shape, plan)


standalone = TurboQuantKVCache


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> ComposedCache:
    """The cache of one layer of a model."""
    refuse_standalone_settings(config)
    return layer_of(config, shape, turboquant_mse_plan(config))
