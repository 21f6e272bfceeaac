"""kvtc: principal components at optimal widths within a budget of bits for each token.

The covariance of the first 256 tokens after the sinks gives every head a basis; a dynamic program
gives each component the width that makes the whole error least. Sinks, the tokens before the fit
and an incomplete block of 64 stay exact. Without calibration the basis suits later tokens as far as
they resemble the first ones.
Source: Staniszewski and Łańcucki, KVTC, 2025, arXiv 2511.01815. Differs: a basis for each head and
layer from the sequence itself instead of one across layers from a calibration set; keys are coded
as they are cached, rotated by position, in a basis that suits all positions (where the layer's
rotation is known) instead of being turned back for every query; DEFLATE is for files
(`quantizers/entropy.py`), not for what is held, whose size it would make unknown beforehand.
"""

from collections.abc import Iterator
from typing import Any, cast

import mlx.core as mx
import numpy as np

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.coded import kvtc_plan
from veloxquant.cache.rope import shiftable
from veloxquant.cache.turned_moments import TurnedMoments
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.entropy import deflate
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.coded import TransformSpec
from veloxquant.quantizers.transform import TransformCodec


class KVTCKVCache(ComposedCache):
    """Bit streams of components behind exact sinks, with a basis for every head."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, rope: Any | None) -> None:
        plan, key_codec = kvtc_plan(config), None
        if shiftable(rope):
            spec = plan.keys.spec
            assert isinstance(spec, TransformSpec)
            moments = TurnedMoments(rope, plan.keys.n_sink)
            key_codec = cast(Codec, TransformCodec(shape.k_dim, spec, moments))
        super().__init__(plan, shape, config.method, (key_codec, None))
        self.bit_budget = config.kvtc_bit_budget
        """Most bits of one key or value."""

    @property
    def kvtc_bytes(self) -> int:
        """Bytes of packed keys and values with their bases."""
        return self.compressed_key_bytes + self.compressed_value_bytes

    @property
    def pre_entropy_bytes(self) -> int:
        """Bytes of the codes alone, as they are held."""
        return sum(words.nbytes for words in self._words())

    @property
    def entropy_coding_gain(self) -> float:
        """How many times smaller the codes would be in a file; 1.0 while there are none."""
        coded = sum(len(deflate(np.asarray(words))) for words in self._words())
        return self.pre_entropy_bytes / coded if coded else 1.0

    @property
    def full_seq_bytes(self) -> int:
        """Bytes that all tokens would take in 16 bits."""
        return self.full_bytes()

    @property
    def compression_ratio(self) -> float:
        """16-bit bytes over bytes held; 1.0 while empty."""
        return self.effective_compression_ratio

    def _words(self) -> Iterator[mx.array]:
        for stream in (self.keys_stream, self.values_stream):
            if stream.body.length:
                yield stream.body.live[3]["w"]


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> KVTCKVCache:
    """The cache of one layer."""
    return KVTCKVCache(config, shape, context.rope)
