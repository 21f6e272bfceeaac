"""kitty: kivi at two bits, with four bits for the liveliest key channels of every page.

At two bits few key channels do most of the damage. Every page of `kitty_group_size` tokens ranks
its channels by variance and gives the first `kitty_hi_fraction` of them `kitty_hi_bit` bits; a
page is never coded again. Values are kivi's at `kitty_lo_bit` bits, windows too.
Source: Xia et al., Kitty, 2025, arXiv 2511.18643. Differs: pages of 32 tokens instead of 128 and a
quarter of the channels by default; no exact first tokens; variance ranks channels. With
`kitty_group_size=128` the metadata of keys falls from 17 to 5 bytes a token at 128 channels.
"""

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.grouped import kitty_plan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape


class KittyKVCache(ComposedCache):
    """Keys per channel in two planes, values per token, both behind an exact window."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape) -> None:
        super().__init__(kitty_plan(config), shape, config.method)
        self.hi_fraction = config.kitty_hi_fraction
        """Share of key channels with the high width."""
        self.hi_bit, self.lo_bit = config.kitty_hi_bit, config.kitty_lo_bit
        self.group_size = config.kitty_group_size
        """Tokens of a page of keys, channels of a group of values."""

    @property
    def value_fp16_bytes(self) -> int:
        """Bytes that the values of all tokens would take in 16 bits."""
        return self.fp16_value_bytes


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> KittyKVCache:
    """The cache of one layer."""
    return KittyKVCache(config, shape)
