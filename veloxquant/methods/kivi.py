"""kivi: keys per channel, values per token, newest tokens exact.

Key outliers sit in fixed channels, so each channel gets its own scale over a group of tokens;
values have none, so each token gets scales over groups of channels. Keys wait in full precision
until `residual_length` of them make a block; values stay exact while they are among the newest
`residual_length`, and leave in steps of 32.
Source: Liu et al., KIVI, 2024, arXiv 2402.02750. Differs: blocks are cut at absolute positions, so
the state does not depend on how a prompt was chunked; values leave 32 at a time, not singly.
"""

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.grouped import kivi_plan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape


class KIVIKVCache(ComposedCache):
    """Packed keys per channel and values per token behind an exact window."""


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> KIVIKVCache:
    """The cache of one layer."""
    return KIVIKVCache(kivi_plan(config), shape, config.method)
