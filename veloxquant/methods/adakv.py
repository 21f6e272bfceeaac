"""adakv: bits by head, under a fixed mean for the layer.

Heads whose key norms vary more get more bits, the others fewer; every block of `adakv_group_size`
tokens gives each KV head one of three widths, for its keys and its values, from the statistics of
all blocks up to it. A block is never coded again, and the mean is met block by block, so the size
of a cache does not depend on its text. Keys are kivi's groups along tokens, values groups along
channels; the tokens of an unfinished block are exact.
Source: the name and the idea of a budget by head are of Feng et al., Ada-KV, 2024, arXiv
2407.11550, which evicts tokens; bits by head are this library's. "attention_entropy" takes keys as
queries within a block, as documented, and is a proxy of the attention it is named for.
"""

from typing import cast

import mlx.core as mx
import numpy as np

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.head_stream import HeadStream
from veloxquant.cache.layouts.grouped import adakv_plan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.importance import ATTENTION_ENTROPY, importance_of
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.head_bits import HeadBitsSpec


class AdaKVCache(ComposedCache):
    """Packed blocks in widths by head, and the exact rest."""

    stream_type = HeadStream
    keys_stream: HeadStream
    values_stream: HeadStream

    def __init__(self, config: KVCacheConfig, shape: LayerShape) -> None:
        super().__init__(adakv_plan(config, shape.n_kv_heads), shape, config.method)
        self.values_stream.body.leader = self.keys_stream.body
        self.target_avg_bits = config.adakv_target_avg_bits
        """Mean code bits of an element."""
        self.allowed_bits = [config.adakv_lo_bit, config.adakv_mid_bit, config.adakv_hi_bit]
        self.group_size = config.adakv_group_size
        """Tokens of a block, channels of a group of values."""
        self.importance_mode = config.adakv_importance
        if self.importance_mode == ATTENTION_ENTROPY:
            self.fidelity = "proxy"

    @property
    def head_bits(self) -> list[int]:
        """Bits of each head in the newest block, of the first sequence; empty before a block."""
        body = self.keys_stream.body
        if not body.length:
            return []
        return [int(n) for n in self._block_bits()[0, :, -1]]

    @property
    def head_importance(self) -> list[float]:
        """Importance of each head by all blocks, of the first sequence; empty before a block."""
        body = self.keys_stream.body
        if not body.length:
            return []
        blocks = body.length // self.group_size
        sums = body.live[3]["z"][:1, :, blocks - 1 : blocks]
        found = importance_of(sums, mx.array([blocks]), self.group_size, self.importance_mode)
        return [float(w) for w in np.array(found)[0, :, 0]]

    @property
    def realised_avg_bits(self) -> float:
        """Mean code bits of the blocks held, scales not counted; the lowest width before any."""
        if not self.keys_stream.body.length:
            return float(self.allowed_bits[0])
        return float(self._block_bits().mean())

    def _block_bits(self) -> np.ndarray:
        """Bits of every block held: (B, H, blocks)."""
        spec = cast(HeadBitsSpec, self.keys_stream.body.codec.spec)
        return spec.choices[0] + spec.unit * np.array(self.keys_stream.body.units())

    @property
    def value_fp16_bytes(self) -> int:
        """Bytes that the values of all tokens would take in 16 bits."""
        return self.fp16_value_bytes


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> AdaKVCache:
    """The cache of one layer."""
    return AdaKVCache(config, shape)
