"""kivi_sink: kivi behind the first tokens, which stay exact.

The first tokens draw much attention and have atypical keys, whose extremes would spoil the first
group; keeping five of them costs 2.5 KiB a head. Blocks are counted from the first token after
the sinks.
Source: KIVI (arXiv 2402.02750) with the preserve-first-N practice of KVQuant (arXiv 2401.18079) and
KVSink (arXiv 2508.04257).
"""

from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.grouped import kivi_sink_plan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.methods.kivi import KIVIKVCache
from veloxquant.quantizers.sizes import LayerShape


class KIVISinkKVCache(KIVIKVCache):
    """kivi with exact sinks."""

    @property
    def n_sink_tokens(self) -> int:
        """Tokens kept exact at the start."""
        return self.plan.keys.n_sink


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> KIVISinkKVCache:
    """The cache of one layer."""
    return KIVISinkKVCache(kivi_sink_plan(config), shape, config.method)
