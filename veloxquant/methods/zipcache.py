"""zipcache: salient tokens at more bits than the rest.

Tokens are ranked in blocks of four groups; the most salient share gets the wider codes. Keys lie
per channel in groups of tokens of one class. Values have one scale a token over all channels, after
division by a factor a channel. A block is ranked once and never again.
Source: He et al., ZipCache, 2024, arXiv 2405.14256. Differs: saliency is the norm of the key, as
documented here, instead of attention of probe queries, so the state does not depend on how a prompt
was cut; the salient class is rounded up to whole groups with the next salient tokens instead of
padding; factors of value channels come from the first block.
"""

import mlx.core as mx

from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.tiered import zipcache_plan
from veloxquant.cache.paired import PairedCache
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.classed import ClassedCodec
from veloxquant.quantizers.saliency import small_norm_saliency
from veloxquant.quantizers.sizes import LayerShape

FIRST_TOKENS = 4
"""Tokens at the start that are salient in any case: models lean on them."""


class ZipCacheKVCache(PairedCache):
    """Blocks of salient and other tokens behind an exact, unfinished block."""

    fidelity = "proxy"

    def choose(self, keys: mx.array, values: mx.array | None, *, first: bool) -> mx.array:
        """Classes by the norm of the keys."""
        del values
        saliency = small_norm_saliency(keys)
        if first:
            start = mx.arange(keys.shape[2]) < FIRST_TOKENS
            saliency = mx.where(start, mx.inf, saliency)
        codec = self.keys_stream.body.codec
        assert isinstance(codec, ClassedCodec)
        return codec.classes(saliency)

    @property
    def baseline_key_bytes(self) -> int:
        """Bytes that the keys of all tokens would take in 16 bits."""
        return self.fp16_key_bytes

    @property
    def baseline_value_bytes(self) -> int:
        """Bytes that the values of all tokens would take in 16 bits."""
        return self.fp16_value_bytes

    @property
    def compression_ratio(self) -> float:
        """16-bit bytes of all tokens over the bytes held; 1.0 while empty."""
        return self.effective_compression_ratio

    @property
    def effective_avg_bits(self) -> float:
        """Mean bits per element really held, scales and windows included."""
        return self.assigned_avg_bits


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> ZipCacheKVCache:
    """The cache of one layer."""
    return ZipCacheKVCache(zipcache_plan(config), shape, config.method)
