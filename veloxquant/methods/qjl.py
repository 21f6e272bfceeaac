"""qjl: keys as the signs of random projections and a norm, values in affine groups.

The query stays exact, so that the mean of signs times projected query is an unbiased estimate of
the inner product; no scale and no zero point is kept for keys. As many projections as channels are
noisy: two to four times as many are worth their bytes.
Source: QJL, Zandieh et al., 2024, arXiv 2406.03482. Differs: no exact window (the paper keeps 128
tokens); loud channels are found once in a head's first tokens instead of in every 32.
"""

import logging
from functools import lru_cache

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.rotated import qjl_plan
from veloxquant.cache.standalone import StandaloneCache, layer_of, refuse_standalone_settings
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape

_log = logging.getLogger(__name__)


class QJLKVCache(StandaloneCache):
    """One head in qjl, fed vector by vector."""

    def make_layer(self, config: KVCacheConfig, shape: LayerShape) -> ComposedCache:
        """Signs of keys and affine values."""
        _tell_of_noise(config.jl_dim or shape.k_dim, shape.k_dim)
        return layer_of(config, shape, qjl_plan(config))


standalone = QJLKVCache


@lru_cache(maxsize=8)
def _tell_of_noise(rows: int, dim: int) -> None:
    """Say once a size that few projections are noisy."""
    if rows < 2 * dim:
        _log.info(
            "qjl with %d signs for %d channels is noisy; jl_dim=%d or more scores better",
            rows, dim, 2 * dim,
        )  # fmt: skip


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> ComposedCache:
    """The cache of one layer of a model."""
    refuse_standalone_settings(config)
    _tell_of_noise(config.jl_dim or shape.k_dim, shape.k_dim)
    return layer_of(config, shape, qjl_plan(config))
