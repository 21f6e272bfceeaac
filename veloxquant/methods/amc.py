"""amc: three tiers of tokens, with fewer channels and fewer bits the less salient they are.

In every block of 64 tokens the most salient fifth keeps all channels at 8 bits, the next three
tenths keep the three quarters of the channels that vary most at 4 bits, the rest keeps half of them
at 4 bits; channels left out are their mean. A token is salient by the distance of its key from the
mean key. Order and means of channels come from the first block, those of values from a text of
calibration if there is one. On heads whose channels vary alike, dropping half of them loses half of
the energy: the low tier is for heads with few strong channels.
With `amc_use_query_saliency` the cosine with recent queries joins the ranking; then the state
depends on how a prompt was cut, since queries arrive with its pieces.
Source: none under this name; a design of this library.
"""

from collections.abc import Iterator
from typing import Any, Literal, cast

import mlx.core as mx

from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.fitting import check_queries
from veloxquant.cache.given import given_codecs, kept_tokens
from veloxquant.cache.layouts.tiered import AMC_BLOCK, AMC_QUERIES, amc_plan
from veloxquant.cache.paired import ClassStore, PairedCache
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.fitted import fit_side
from veloxquant.quantizers.saliency import cosine_saliency, rank
from veloxquant.quantizers.sizes import LayerShape


class AMCKVCache(PairedCache):
    """Blocks of 64 tokens in three tiers behind an exact, unfinished block."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> None:
        plan = amc_plan(config)
        codecs = given_codecs(plan, shape, context)
        super().__init__(plan, shape, config.method, codecs)
        self.calibrated = codecs[1] is not None
        """Whether order and means of value channels come from a text of calibration."""
        self.alpha = config.amc_query_alpha if config.amc_use_query_saliency else 0.0
        self.fidelity: Literal["exact", "proxy"] = "proxy"
        self.recent: mx.array | None = None
        """Queries (B, Hq, n, D) of the newest tokens, while they take part in the ranking."""

    # ---- saliency -----------------------------------------------------------------------

    def choose(self, keys: mx.array, values: mx.array | None, *, first: bool) -> mx.array:
        """Tiers by distance from the mean key, and by cosine with recent queries if wanted."""
        del values
        body = cast(ClassStore, self.keys_stream.body)
        constants = body.classed.fit(keys[:, :, :AMC_BLOCK]) if first else body.constants
        away = keys.astype(mx.float32) - constants["c"].astype(mx.float32)
        saliency = mx.linalg.norm(away, axis=-1)
        if self.recent is not None and self.alpha > 0:
            near = cosine_saliency(self.recent, keys)
            saliency = (1 - self.alpha) * _share(saliency) + self.alpha * _share(near)
        return body.classed.classes(saliency)

    def observe(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> None:
        """Keep the newest queries while they take part in the ranking."""
        del scale, sinks
        if self.alpha == 0:
            return
        if self.recent is not None:
            queries = mx.concatenate([self.recent, queries.astype(self._dtype)], axis=2)
        self.recent = mx.contiguous(queries[:, :, -AMC_QUERIES:].astype(self._dtype))
        self._unevaluated.append(self.recent)
        self.fidelity = "exact"

    def extra_arrays(self) -> Iterator[mx.array]:
        """The queries kept."""
        if self.recent is not None:
            yield self.recent

    def extra_state(self) -> list[Any]:
        """The queries kept, or None."""
        return [self.recent]

    def restore_extra(self, saved: list[Any]) -> None:
        """Take the queries back.

        Raises:
            CacheStateError: when they are not the newest queries of the tokens held.
        """
        recent = saved[0] if saved else None
        if recent is not None:
            check_queries(recent, self._known_shape(), self._dtype, min(self.offset, AMC_QUERIES))
            self.fidelity = "exact"
        self.recent = recent

    def drop(self, n: int) -> int:
        """Rewind the tokens and the queries that came with them; older queries are gone."""
        n = super().drop(n)
        if self.recent is not None and n:
            left = self.recent.shape[2] - n
            self.recent = mx.contiguous(self.recent[:, :, :left]) if left > 0 else None
            self.fidelity = "proxy" if self.recent is None else "exact"
        return n

    # ---- counters of the documents ------------------------------------------------------

    @property
    def amc_kept_bytes(self) -> int:
        """Bytes held, the exact block and growth steps included."""
        return self.nbytes

    @property
    def full_seq_bytes(self) -> int:
        """Bytes that all tokens would take in 16 bits."""
        return self.full_bytes()

    @property
    def compression_ratio(self) -> float:
        """16-bit bytes of all tokens over the bytes held; 1.0 while empty."""
        return self.effective_compression_ratio

    @property
    def tokens_seen(self) -> int:
        """Tokens fed, minus tokens rewound."""
        return self.offset

    @property
    def tokens_kept(self) -> int:
        """Tokens held: all of them."""
        return self.rows

    def _in_tier(self, tier: int) -> int:
        body = cast(ClassStore, self.keys_stream.body)
        count, _ = body.classed.spec.classes[tier]
        return body.length // AMC_BLOCK * count

    @property
    def tokens_high(self) -> int:
        """Tokens in the first tier and those that still wait for their block."""
        return self.rows - self.tokens_mid - self.tokens_low

    @property
    def tokens_mid(self) -> int:
        """Tokens in the second tier."""
        return self._in_tier(1)

    @property
    def tokens_low(self) -> int:
        """Tokens in the third tier."""
        return self._in_tier(2)


def _share(saliency: mx.array) -> mx.array:
    """Ranks (B, H, n) inside each block, 1 for the most salient token and 0 for the least."""
    batch, heads, n = saliency.shape
    place = rank(saliency.reshape(batch, heads, n // AMC_BLOCK, AMC_BLOCK))
    return 1 - place.reshape(batch, heads, n) / (AMC_BLOCK - 1)


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> AMCKVCache:
    """The cache of one layer."""
    return AMCKVCache(config, shape, context)


FIT_FIELDS = ()
"""Fitted arrays depend on no setting."""


def fit(config: KVCacheConfig, sample: LayerSample) -> dict[str, mx.array]:
    """Orders and means of the value channels of one layer, from what it saw of a text.

    Keys keep those of their first block: a mean of all positions would shift the scores of dropped
    channels against those of exact tokens (measured: twice the divergence).
    """
    stream = amc_plan(config).values
    values = mx.take(sample.values, kept_tokens(stream, sample), axis=1)
    return fit_side(stream.spec, "value", values)
