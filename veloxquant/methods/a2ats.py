"""a2ats: position-free vector codes find the tokens worth reading.

Sinks and a window are exact; the tokens between are kept in 4 bits, keys and values. Beside them
every such key has a code of a few bits, made from the key without its rotation. A step of one query
scores the codes as if every far token were `a2ats_b` positions away, takes the best
`a2ats_retrieval_fraction` of them for each KV head, and attends to these, sinks and window with
their true positions. Steps of several queries attend to everything, as prompts do in the paper.
The codebook is given, or fitted once to the first far keys of the sequence; until then every
token is read. Without views of attention no query is seen and every token is read as well.
Source: He et al., A2ATS, 2025, arXiv 2502.12665. Differs: the paper keeps exact rows on the host;
codes are products of short ones; heads of a group share the best tokens by their largest
normalised score; `a2ats_beta` shrinks the query moment towards plain distance.
"""

import math
from collections.abc import Iterator
from typing import ClassVar, cast

import mlx.core as mx

from veloxquant.cache.attend import Run, attend
from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.layouts.vector import A2ATS_SINKS, a2ats_codes, a2ats_plan, coded_tokens
from veloxquant.cache.picked import Picked
from veloxquant.cache.store import Store
from veloxquant.cache.view import AttentionCall
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import CodebookDimensionMismatch, QuantizerConfigError
from veloxquant.quantizers.a2ats import (
    a2ats_query_second_moment,
    fit_retrieval_codebook,
    shrunk_moment,
)
from veloxquant.quantizers.a2ats_rope import PositionCode
from veloxquant.quantizers.base import Codec, compute_dtype
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.rope_vq import QueryWeighted, RetrievalCodec
from veloxquant.quantizers.sizes import BODY_STEP, LayerShape
from veloxquant.quantizers.vq import given_table


class A2ATSKVCache(ComposedCache):
    """Two streams in 4 bits and the codes of their far keys."""

    constants: ClassVar[frozenset[str]] = frozenset({"position", "codec"})

    def __init__(self, config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> None:
        super().__init__(a2ats_plan(config), shape, config.method)
        self.codec = _codec(config, shape, context)
        self.codes = Store(cast(Codec, self.codec), BODY_STEP)
        self.fraction = config.a2ats_retrieval_fraction
        self.distance = config.a2ats_b
        self.position = PositionCode.of(
            context.rope, shape.k_dim, config.a2ats_rope_base, config.a2ats_rope_scaling
        )

    # ---- tokens in and out --------------------------------------------------------------

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Append to both streams, then code what became far."""
        super().write(keys, values)
        self._code()

    def drop(self, n: int) -> int:
        """Rewind the streams and the codes."""
        done = super().drop(n)
        self.codes.trim(self.codes.length - self._coded())
        return done

    def _coded(self) -> int:
        return coded_tokens(self.codec.spec, self.keys_stream.body.length)

    def _code(self) -> None:
        """Codes for far tokens that have none, from their packed keys without rotation.

        Packed keys are read by the codec's own operations, whatever their number, so that codes do
        not depend on how many came at once.
        """
        have, want = self.codes.length, self._coded()
        if want <= have:
            return
        body = self.keys_stream.body
        part = {name: a[:, :, have:want] for name, a in body.live[3].items()}
        keys = body.codec.decode(part, mx.float32)
        at = A2ATS_SINKS + mx.arange(have, want)
        self.codes.append(self.position.turn(keys, -at))

    # ---- attention ----------------------------------------------------------------------

    def attend(self, call: AttentionCall) -> mx.array:
        """Attention of (B, Hq, L, D): of a single query with the retrieved tokens, else with all.

        Raises:
            CacheStateError: when the cache moved on since the view was made.
        """
        if not call.of_one_token(self.rows) or not self._sparse():
            return super().attend(call)
        index = self.retrieved(call.queries, call.scale)
        keys, values = self.runs()
        sides = [self._narrowed(keys, index), self._narrowed(values, index)]
        _, heads, _, v_dim = self._known_shape()
        out = attend(
            call.queries, *sides, n_kv=heads, v_dim=v_dim,
            scale=call.scale, mask=None, sinks=call.sinks, use_kernels=self.use_kernels,
        )  # fmt: skip
        return self._settled(out)

    def _sparse(self) -> bool:
        return 0 < self.tokens_retrieved < self.codes.length

    def _narrowed(self, runs: list[Run], index: mx.array) -> list[Run]:
        bodies = (self.keys_stream.body, self.values_stream.body)
        return [Picked(run, index) if run in bodies else run for run in runs]  # type: ignore[arg-type]

    def retrieved(self, queries: mx.array, scale: float) -> mx.array:
        """Ascending indices (B, H, n) of the far tokens that queries (B, Hq, 1, D) read.

        Every query head's scores are brought to log-probabilities, and a token counts by the
        largest of its group.
        """
        batch, heads, dim, _ = self._known_shape()
        repeat = queries.shape[1] // heads
        q = queries.astype(compute_dtype(queries.dtype)) * scale
        q = self.position.turn(q, mx.array(float(self.distance - (self.offset - 1))))
        scores = self.codes.scores(q.reshape(batch, heads, repeat, dim)).astype(mx.float32)
        if repeat > 1:
            scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
        best = scores.max(axis=2)
        n, total = self.tokens_retrieved, self.codes.length
        top = mx.argpartition(best, total - n, axis=-1)[..., total - n :]
        return mx.sort(top, axis=-1)

    # ---- state --------------------------------------------------------------------------

    def extra_arrays(self) -> Iterator[mx.array]:
        """Codes and their fitted codebook."""
        yield from self.codes.arrays()

    def layout(self) -> list[Store]:
        """The streams' stores and the codes."""
        return [*super().layout(), self.codes]

    def fits_plan(self, offset: int, held: list[int]) -> bool:
        """The streams by the plan, and codes for every far token."""
        body = self.plan.keys.rows(offset)[1]
        coded = coded_tokens(self.codec.spec, body)
        return super().fits_plan(offset, held[:-1]) and held[-1] == coded

    # ---- counters of the documents ------------------------------------------------------

    @property
    def compressed_key_bytes(self) -> int:
        """Bytes of packed keys, their codes and the fitted codebook."""
        return super().compressed_key_bytes + self.codes.nbytes

    @property
    def codebook_bytes(self) -> int:
        """Bytes of the codebook: the fitted one, or the given one in 16 bits."""
        if self.codec.table is not None:
            return 2 * self.codec.table.centroids.size
        return sum(a.nbytes for name, a in self.codes.live[3].items() if name == "book")

    @property
    def compression_ratio(self) -> float:
        """16-bit bytes over bytes held; 1.0 while empty."""
        return self.effective_compression_ratio

    @property
    def tokens_seen(self) -> int:
        """Tokens fed, minus tokens rewound."""
        return self.offset

    @property
    def tokens_retrieved(self) -> int:
        """Far tokens of each KV head that a single query reads; all while they have no codes."""
        body = self.keys_stream.body.length
        return math.ceil(self.fraction * body) if self.codes.length else body

    def far_query_rope(self, query: mx.array) -> mx.array:
        """Queries (..., D) without position, turned by the constant distance of far tokens."""
        return self.position.turn(query, mx.array(float(self.distance)))


def _codec(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> RetrievalCodec:
    """The codec of far keys, from the configuration before the calibration."""
    found = context.artifacts or {}
    sub, width, dim = config.a2ats_sub_dim, config.a2ats_codebook_bits, shape.k_dim
    if dim % sub:
        raise QuantizerConfigError(
            f"codes of {sub} channels do not divide heads of {dim}; set a2ats_sub_dim to a "
            f"divisor of {dim}"
        )
    codebook, moment = config.a2ats_codebook, config.a2ats_query_h
    codebook = found.get("a2ats_codebook") if codebook is None else codebook
    moment = found.get("a2ats_query_h") if moment is None else moment
    table, basis = None, None
    if codebook is not None:
        table = given_table(
            codebook, "a2ats_codebook", sub=sub, bits=width, heads=shape.n_kv_heads, dim=dim,
            layer=context.layer,
        )  # fmt: skip
    beta = config.a2ats_beta if config.a2ats_use_query_aware else 0.0
    if moment is not None and beta:
        h = mx.array(moment, dtype=mx.float32)
        if h.shape not in ((dim, dim), (shape.n_kv_heads, dim, dim)):
            raise CodebookDimensionMismatch(
                f"a2ats_query_h of shape {tuple(h.shape)} does not fit; give ({dim}, {dim}) or "
                f"({shape.n_kv_heads}, {dim}, {dim})"
            )
        basis = QueryWeighted(shrunk_moment(h, beta))
    spec = a2ats_codes(config, given=table is not None)
    if table is None and basis is None:
        return cast(RetrievalCodec, codec_for(spec, dim))
    return RetrievalCodec(dim, spec, table, basis)


def fit(sample: LayerSample, config: KVCacheConfig) -> dict[str, mx.array]:
    """Second moment of queries (H, D, D) and the codebook (H, n_sub, 2^bits, sub) of one layer."""
    rope = PositionCode.of(
        sample.rope, sample.shape.k_dim, config.a2ats_rope_base, config.a2ats_rope_scaling
    )
    keys = rope.turn(sample.keys, -sample.positions)
    out: dict[str, mx.array] = {}
    beta = config.a2ats_beta if config.a2ats_use_query_aware else 0.0
    moments = None
    if sample.queries is not None and beta:
        far = rope.turn(sample.queries, config.a2ats_b - sample.positions)
        groups = far.reshape(sample.shape.n_kv_heads, -1, sample.shape.k_dim)
        moments = mx.stack([a2ats_query_second_moment(g) for g in groups])
        out["a2ats_query_h"] = moments
    books = []
    for head, k in enumerate(keys):
        weighted = None if moments is None else shrunk_moment(moments[head], beta)
        books.append(
            fit_retrieval_codebook(
                k, config.a2ats_sub_dim, config.a2ats_codebook_bits, weighted, config.seed
            )
        )
    out["a2ats_codebook"] = mx.stack(books)
    return out


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> A2ATSKVCache:
    """The cache of one layer."""
    return A2ATSKVCache(config, shape, context)
