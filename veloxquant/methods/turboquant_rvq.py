"""turboquant_rvq: rotate, normalise, code each coordinate in two stages; the library's default.

No calibration and no window: every token is coded alone when it is committed, keys and values
alike, so the state is exact for any chunking and rewinding. The last code bit refines the coarse
code and can be dropped.
Source: TurboQuant, Zandieh et al., 2025, arXiv 2504.19874, with the sketch of the residual replaced
by a second quantizer of the residual (derived; no paper under this name).
"""

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.base import width
from veloxquant.cache.layouts.rotated import turboquant_rvq_plan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import BODY_STEP, LayerShape


class TurboQuantRVQKVCache(ComposedCache):
    """Two code planes and a norm for every key and every value."""

    step = BODY_STEP

    def __init__(self, config: KVCacheConfig, shape: LayerShape) -> None:
        super().__init__(turboquant_rvq_plan(config), shape, config.method)
        self.assigned_bits = width(config)
        """Code bits of each coordinate, norms not counted."""


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> TurboQuantRVQKVCache:
    """The cache of one layer."""
    return TurboQuantRVQKVCache(config, shape)
