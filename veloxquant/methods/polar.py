"""polar: rotated vectors as the angles of a binary tree and one radius.

Pairs of coordinates become a radius and an angle, pairs of radii likewise, up to one radius. The
angles' laws are known and narrow with every level, so they need neither scales nor calibration.
Angles between coordinates span a full circle and get two bits more than the others.
Source: PolarQuant, Han et al., 2025, arXiv 2502.02617. Differs: the recursion runs to a single
radius (the paper stops after four levels), and the radius makes up for what the angles lose.
"""

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.rotated import polar_plan
from veloxquant.cache.standalone import StandaloneCache, layer_of, refuse_standalone_settings
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape


class PolarQuantKVCache(StandaloneCache):
    """One head in polar, fed vector by vector."""

    def make_layer(self, config: KVCacheConfig, shape: LayerShape) -> ComposedCache:
        """Angles and radii of keys and values."""
        return _layer(config, shape)


standalone = PolarQuantKVCache


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> ComposedCache:
    """The cache of one layer of a model."""
    refuse_standalone_settings(config)
    return _layer(config, shape)


def _layer(config: KVCacheConfig, shape: LayerShape) -> ComposedCache:
    for size in (shape.k_dim, shape.v_dim):
        if size % 2:
            raise QuantizerConfigError(
                f"head_dim={size} is odd; method 'polar' pairs coordinates, choose another method"
            )
    return layer_of(config, shape, polar_plan(config))
