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


class SinkProtectedKVCache(KIVIKVCache):
    """kivi with exact sinks."""

    @property
    def n_sink_tokens(self) -> int:
        """Tokens kept exact at the start."""
        return self.plan.keys.n_sink

    @property
    def sink_positions(self) -> list[int]:
        """Positions of the tokens that are exact sinks; the same in every sequence of a batch."""
        return list(range(min(self.offset, self.n_sink_tokens)))

    def sink_positions_for(self, b: int) -> list[int]:
        """Sinks of sequence `b`.

        Raises:
            IndexError: when there is no such sequence.
        """
        batch = self._shape[0] if self._shape is not None else 0
        if not 0 <= b < batch:
            raise IndexError(f"sequence {b} of a cache with {batch}")
        return self.sink_positions

    @property
    def sink_fp16_bytes(self) -> int:
        """Bytes of the exact sinks of keys and values."""
        return self.keys_stream.sinks.nbytes + self.values_stream.sinks.nbytes


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> SinkProtectedKVCache:
    """The cache of one layer."""
    return SinkProtectedKVCache(kivi_sink_plan(config), shape, config.method)
