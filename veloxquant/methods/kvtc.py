"""kvtc: principal components at optimal widths within a budget of bits for each token.

The covariance of the first 256 tokens after the sinks gives every head a basis; a dynamic program
gives each component the width that makes the whole error least. Sinks, the tokens before the fit
and an incomplete block of 64 stay exact. Without calibration the basis suits later tokens as far as
they resemble the first ones; with one, moments of its text count for keys beside theirs. Where the
first tokens repeat, so that a few of them are different, every direction gets a width.
Source: Staniszewski and Łańcucki, KVTC, 2025, arXiv 2511.01815. Differs: a basis for each head and
layer from the sequence itself instead of one across layers from a calibration set; keys are coded
as they are cached, rotated by position, in a basis that suits all positions (where the layer's
rotation is known) instead of being turned back for every query; DEFLATE is for files
(`quantizers/entropy.py`), not for what is held, whose size it would make unknown beforehand.
Exact tokens of the incomplete block, up to 63, and the bases are what it holds beyond its bits.
"""

from collections.abc import Iterator
from typing import Any, cast

import mlx.core as mx
import numpy as np

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.given import kept_tokens
from veloxquant.cache.layouts.coded import kvtc_plan
from veloxquant.cache.plans import StreamPlan
from veloxquant.cache.rope import shiftable
from veloxquant.cache.turned_moments import TurnedMoments
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.entropy import deflate
from veloxquant.quantizers.prior import MomentsOf, moments_arrays, prior_of
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.coded import TransformSpec
from veloxquant.quantizers.transform import TransformCodec, sample_moments


class KVTCKVCache(ComposedCache):
    """Bit streams of components behind exact sinks, with a basis for every head."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> None:
        plan = kvtc_plan(config)
        spec = plan.keys.spec
        assert isinstance(spec, TransformSpec)
        own = _key_moments(plan.keys, context.rope)
        prior = prior_of(context.artifacts, "key", shape.n_kv_heads, shape.k_dim, own)
        codec = cast(Codec, TransformCodec(shape.k_dim, spec, prior or own))
        super().__init__(plan, shape, config.method, (codec, None))
        self.calibrated = prior is not None
        """Whether a text of calibration has a say in the bases of keys."""
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
    return KVTCKVCache(config, shape, context)


FIT_FIELDS = ()
"""Moments depend on no setting."""


def fit(config: KVCacheConfig, sample: LayerSample) -> dict[str, mx.array]:
    """Moments of the keys of one layer, from what it saw of a text behind the sinks.

    Those of values belong to their text: blended with another's they lower the error of rows, but
    answers diverge more (measured).
    """
    stream = kvtc_plan(config).keys
    kept = kept_tokens(stream, sample)
    found = _key_moments(stream, sample.rope, mx.take(sample.positions, kept))
    return moments_arrays("key", found(mx.take(sample.keys, kept, axis=1)[None]))


def _key_moments(
    stream: StreamPlan, rope: Any | None, positions: mx.array | None = None
) -> MomentsOf:
    """What finds moments of keys: for all positions, where the rotation is known."""
    return TurnedMoments(rope, stream.n_sink, positions) if shiftable(rope) else sample_moments
