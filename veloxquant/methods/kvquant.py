"""kvquant: unequally spaced levels, outliers exact, the first token exact.

Keys are normalised by channel, values by token and group, and coded with a few levels fitted to
them; the largest entries of each token are kept exactly beside the codes. Ranges of key channels
and levels are fitted once to the first tokens behind the sinks, or with `kvquant_refit_interval`
to every block of that many tokens, which then waits in full precision until it is complete.
Without an interval they may come from a text of calibration instead.
Source: Hooper et al., KVQuant, 2024, arXiv 2401.18079. Differs: keys are coded after position
encoding, as the cache receives them; levels are fitted online to each head and entries weigh the
same; tokens are coded 32 at a time, which costs less time than one by one and leaves up to 31 of
them exact; a token outside the fitted ranges starts no new table.
"""

import mlx.core as mx

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.given import fit_sides, given_codecs
from veloxquant.cache.layouts.grouped import kvquant_plan
from veloxquant.cache.stream import Stream
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape


class KVQuantKVCache(ComposedCache):
    """Coded rows with slots for outliers, behind exact sinks."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> None:
        plan = kvquant_plan(config)
        codecs = given_codecs(plan, shape, context)
        super().__init__(plan, shape, config.method, codecs)
        self.calibrated = any(codecs)
        """Whether ranges and levels come from a text of calibration."""
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
    return fit_sides(kvquant_plan(config), sample)
