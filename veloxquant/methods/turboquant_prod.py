"""turboquant_prod: codes of one bit less, and a sign sketch of what they leave over.

Codes of least squared error shrink inner products; adding the unbiased estimate from the residual's
sketch makes the sum unbiased. Values are not scored, so they are coded as in turboquant_mse.
Source: TurboQuant, Zandieh et al., 2025, arXiv 2504.19874, algorithm 2, with the sketch of QJL,
arXiv 2406.03482. Differs: rows of the sketch are orthogonal in blocks, which cuts its variance
threefold. Even so turboquant_mse has less variance at equal bits.
"""

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.rotated import turboquant_prod_plan
from veloxquant.cache.standalone import layer_of, refuse_standalone_settings
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.methods.turboquant_mse import TurboQuantKVCache
from veloxquant.quantizers.sizes import LayerShape

standalone = TurboQuantKVCache


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> ComposedCache:
    """The cache of one layer of a model."""
    refuse_standalone_settings(config)
    return layer_of(config, shape, turboquant_prod_plan(config))
