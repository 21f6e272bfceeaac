"""kvquant: unequally spaced levels, outliers exact, the first token exact.

Keys are normalised by channel and token, values by token and group, and coded with a few levels
fitted to them; the largest entries of each token are kept exactly beside the codes. Ranges of key
channels and levels are fitted once to the first tokens behind the sinks, or with
`kvquant_refit_interval` to every block of that many tokens, which then waits in full precision
until it is complete.
Without an interval they may come from a text of calibration instead; either way they are made for
keys all over the context where the layer's rotation is known, since a frozen range of rotated keys
suits its own positions only. Where first keys repeat, rows drawn at random stand in for others.
Source: Hooper et al., KVQuant, 2024, arXiv 2401.18079. Differs: keys are coded after position
encoding, as the cache receives them; levels are fitted online to each head and entries weigh the
same; tokens are coded 32 at a time, which costs less time than one by one and leaves up to 31 of
them exact; every key has a factor on the ranges of its channels (two bytes), where tokens outside
would start a new table, which more than halves what 2 and 3 bits change in a small model's answers.
"""

from typing import cast

import mlx.core as mx

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.given import fit_sides, given_codecs, kept_tokens
from veloxquant.cache.layouts.grouped import kvquant_plan
from veloxquant.cache.rope import shiftable
from veloxquant.cache.stream import Stream
from veloxquant.cache.turned_rows import TurnedRows
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.fitted import fit_side
from veloxquant.quantizers.nuq import NuqChannelCodec
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.nuq import NuqChannelSpec


class KVQuantKVCache(ComposedCache):
    """Coded rows with slots for outliers, behind exact sinks."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> None:
        plan = kvquant_plan(config)
        codecs = given_codecs(plan, shape, context)
        self.calibrated = any(codecs)
        """Whether ranges and levels come from a text of calibration."""
        if not self.calibrated and shiftable(context.rope):
            spec = cast(NuqChannelSpec, plan.keys.spec)
            seen = TurnedRows(context.rope, plan.keys.n_sink)
            codecs = cast(Codec, NuqChannelCodec(shape.k_dim, spec, seen=seen)), None
        super().__init__(plan, shape, config.method, codecs)
        self.nuq_bits = config.kvquant_bits
        """Bits of a code."""
        self.outlier_fraction = config.kvquant_outlier_fraction
        self.n_sink = config.kvquant_n_sink
        """Tokens kept exact at the start."""

    @staticmethod
    def _held(stream: Stream, name: str) -> mx.array | None:
        return stream.body.live[3].get(name)

    @property
    def outlier_count(self) -> int:
        """Entries held exactly beside their codes, keys and values together."""
        if self._shape is None:
            return 0
        batch, heads, _, _ = self._shape
        sides = ((s.body.length, s.body.codec) for s in (self.keys_stream, self.values_stream))
        return batch * heads * sum(n * getattr(codec, "count", 0) for n, codec in sides)

    @property
    def sink_kept(self) -> int:
        """Sinks held by now."""
        return self.keys_stream.sinks.length

    @property
    def key_outlier_thresh(self) -> mx.array | None:
        """Half the range of every key channel (B, H, tables, D); None before it is fitted."""
        return self._held(self.keys_stream, "rng")

    @property
    def key_levels(self) -> mx.array | None:
        """Levels of keys (B, H, tables, 2^bits); None before they are fitted."""
        return self._held(self.keys_stream, "levels")

    @property
    def value_levels(self) -> mx.array | None:
        """Levels of values (B, H, tables, 2^bits); None before they are fitted."""
        return self._held(self.values_stream, "levels")

    @property
    def effective_bits(self) -> float:
        """Mean bits per element held, everything included."""
        return self.assigned_avg_bits


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> KVQuantKVCache:
    """The cache of one layer."""
    return KVQuantKVCache(config, shape, context)


FIT_FIELDS = (
    "kvquant_bits", "kvquant_outlier_fraction", "kvquant_group_size", "kvquant_lloyd_iters",
)  # fmt: skip
"""Settings that fitted arrays depend on."""


def fit(config: KVCacheConfig, sample: LayerSample) -> dict[str, mx.array]:
    """Ranges and levels of one layer, from what it saw of a text behind the sinks."""
    plan = kvquant_plan(config)
    if not shiftable(sample.rope):
        return fit_sides(plan, sample)
    kept = kept_tokens(plan.keys, sample)
    places = mx.take(sample.positions, kept)
    seen = TurnedRows(sample.rope, plan.keys.n_sink, places, guard=1.0)
    keys, values = (mx.take(rows, kept, axis=1) for rows in (sample.keys, sample.values))
    return fit_side(plan.keys.spec, "key", seen(keys[None])[0]) | fit_side(
        plan.values.spec, "value", values
    )
