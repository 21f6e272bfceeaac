"""qfilters: keys stay by their projection on the direction that a head's queries share.

Queries of a head point one way, so the projection of a key on that way ranks keys without any
query at hand. Where the direction comes from, best first: a calibration of the model
(`vq precompute --method qfilters`), the first `qfilters_calib_tokens` queries of the prompt, or,
where queries cannot be seen, minus the direction of that many keys (`fidelity` says `proxy`).
It is fixed at the first eviction, and nothing is evicted before so many tokens are there. Scores
never change afterwards, so dropping rows after every chunk leaves those that dropping at the end
would leave. Ties keep the earlier row; the newest row always stays.
Source: Godey et al., Q-Filters, 2025, arXiv 2503.02812. Differs: the two fallbacks, sinks, a sign,
and a guard: where the rows kept hold less than `qfilters_min_retention` of the attention of the
newest queries at the first eviction (of all tokens, where queries cannot be seen), a log line or an
error says so, once a sequence.
"""

import logging
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import mlx.core as mx

from veloxquant.cache.attention_rows import attention_rows
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.evicting import EvictingCache, Policy
from veloxquant.cache.qfilters_calibration import average_gqa_filters, compute_qfilters
from veloxquant.cache.queries import QueryRing
from veloxquant.cache.scorers import Rows, Scorer
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import CacheStateError, QuantizerConfigError
from veloxquant.methods.functional.qfilters_state import QFiltersState
from veloxquant.quantizers.sizes import LayerShape

_log = logging.getLogger(__name__)
Source = Literal["", "calibration", "queries", "keys"]
FIT_FIELDS: tuple[str, ...] = ()
WATCHED = 32
"""Most queries that the guard looks at."""


class QueryDirection(Scorer):
    """Projection of each key on its head's filter.

    Args:
        sign: 1 keeps keys along the filter, -1 those against it.
        count: first tokens that a filter is estimated from.
        filters: (1, H, D) fp32 from a calibration.
    """

    static: ClassVar[bool] = True

    def __init__(self, sign: int, count: int, filters: mx.array | None = None) -> None:
        self.sign, self.count, self.filters = sign, count, filters
        self.source: Source = "" if filters is None else "calibration"
        self.tokens = 0
        self.first = QueryRing(None)

    @property
    def can_decide(self) -> bool:
        """Whether there is a filter, or enough tokens to make one of."""
        return self.filters is not None or self.tokens >= self.count

    @property
    def ready(self) -> bool:
        """Whether the filter comes from queries."""
        known = self.source in ("calibration", "queries")
        return known or (not self.source and self.first.length >= self.count)

    def append(self, rows: Rows, keys: mx.array) -> None:
        """Count rows; rate them once a filter was used."""
        self.tokens += keys.shape[2]
        if (old := rows.columns.get("score")) is not None:
            rows.columns["score"] = mx.concatenate([old, self.rate(keys)], axis=-1)

    def observe(
        self, rows: Rows, queries: mx.array, scale: float, sinks: mx.array | None = None
    ) -> None:
        """Keep the first queries until there is a filter."""
        del rows, sinks
        room = self.count - self.first.length
        if self.filters is None and room > 0:
            self.first.push(queries[:, :, :room], scale)

    def rate(self, keys: mx.array) -> mx.array:
        """Projections (B, H, n) fp32 of keys (B, H, n, D)."""
        assert self.filters is not None
        u = self.sign * self.filters[:, :, None]
        return (keys.astype(mx.float32) * u).sum(axis=-1)

    def score(self, rows: Rows) -> mx.array:
        """The column; the filter is fixed when it is asked for first."""
        if self.filters is None:
            keys, queries = rows.keys(1), self.first.queries
            assert queries is not None
            self._fix(mean_filters(queries, keys.shape[1]), "queries")
        if "score" not in rows.columns:
            rows.columns["score"] = self.rate(rows.keys())
        return rows.columns["score"]

    def proxy(self, rows: Rows) -> mx.array:
        """As `score`, with a filter against the first keys."""
        if self.filters is None:
            keys = rows.keys(self.count)
            self._fix(-mean_filters(keys, keys.shape[1]), "keys")
        return self.score(rows)

    def _fix(self, filters: mx.array, source: Source) -> None:
        self.filters, self.source = filters, source
        self.first.forget()

    def rewind(self, n: int) -> None:
        """Queries of the rows taken back go too."""
        self.tokens -= n
        self.first.rewind(self.first.length - max(0, min(self.first.length, self.tokens)))

    def arrays(self) -> Iterator[mx.array]:
        """The filter, or the queries it will be made of."""
        yield from self.first.arrays()
        if self.filters is not None:
            yield self.filters

    def saved(self) -> list[Any]:
        """Queries, the filter, where it came from, and tokens seen."""
        return [self.first.queries, self.first.scale, self.filters, self.source, self.tokens]

    def restore(self, saved: list[Any]) -> None:
        """Take back what `saved` gave.

        Raises:
            CacheStateError: when it holds something other than filters.
        """
        queries, scale, filters, source, tokens = saved
        if (filters is None) != (not source) or (filters is not None and filters.ndim != 3):
            raise CacheStateError("the saved scorer of Q-Filters holds no filters")
        self.first.restore([queries, scale, None])
        self.filters, self.source, self.tokens = filters, source, int(tokens)


class QFiltersKVCache(EvictingCache):
    """Rows with their projections.

    Args:
        config: the configuration.
        shape: the layer's attention shape.
        filters: calibrated (H, D) filters along the queries, None for the fallbacks.
    """

    def __init__(
        self, config: KVCacheConfig, shape: LayerShape, filters: mx.array | None = None
    ) -> None:
        recent = max(1, config.qfilters_recent)
        policy = Policy(config.qfilters_budget, config.qfilters_n_sink, recent)
        given = None
        if filters is not None:
            given = mx.array(filters)[None].astype(mx.float32)
        self.filter_scorer = QueryDirection(
            config.qfilters_sign, config.qfilters_calib_tokens, given
        )
        super().__init__(shape, config.method, policy, self.filter_scorer)
        self.min_retention = config.qfilters_min_retention
        self.on_low_retention = config.qfilters_on_low_retention
        self.watches = self.min_retention is not None and self.on_low_retention != "ignore"
        self.newest = QueryRing(min(config.qfilters_calib_tokens, WATCHED))

    # ---- counters of the documents ------------------------------------------------------

    @property
    def qfilters_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes

    @property
    def states(self) -> list[QFiltersState]:
        """What every head of every sequence holds, made when asked for; none while empty."""
        if not self.rows:
            return []
        keys, values = self.keys(), self.values()
        batch, heads, _, dim = keys.shape
        scores, filters = self.columns.get("score"), self.filter_scorer.filters
        if filters is not None:
            filters = mx.broadcast_to(filters, (batch, *filters.shape[1:]))
        return [
            QFiltersState(
                keys=keys[b, h],
                values=values[b, h],
                n_sink=self.policy.n_sink,
                budget=self.policy.budget,
                head_dim=dim,
                scores=None if scores is None else scores[b, h],
                filter_dir=None if filters is None else filters[b, h],
                recent=self.policy.n_recent,
                calib_tokens=self.filter_scorer.count,
                sign=self.filter_scorer.sign,
            )
            for b in range(batch)
            for h in range(heads)
        ]

    # ---- rows ---------------------------------------------------------------------------

    def _arrived(self, keys: mx.array, count: int) -> None:
        """Rate keys as they will be held, as those before the first eviction were."""
        if "score" in self.columns and not self.writes_through:
            keys = self.as_held(keys, 0).decode(0, count, self._dtype)
        super()._arrived(keys, count)

    def observe(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> None:
        """Show the scorer the queries; the guard looks at those before the first eviction."""
        over = self.rows > self.policy.budget and self.filter_scorer.can_decide
        if self.watches and over and not self.evicted:
            self.newest.push(queries, scale)
        super().observe(queries, scale, sinks)

    def _shrink(self, budget: int) -> None:
        """Wait until a filter can be had."""
        if self.filter_scorer.can_decide:
            super()._shrink(budget)

    def select(self, scores: mx.array, budget: int) -> mx.array:
        """The best rows, once the guard has seen them."""
        keep = super().select(scores, budget)
        if self.watches:
            self._guard(keep)
        return keep

    def _guard(self, keep: mx.array) -> None:
        least = self.min_retention
        assert least is not None
        if (queries := self.newest.queries) is not None:
            first = self.rows - queries.shape[2]
            weights = attention_rows(queries, self.keys(), self.newest.scale, first)
            mass = mx.take_along_axis(weights.mean(axis=(2, 3)), keep, axis=-1)
            held: Any = mass.sum(axis=-1).mean().item()
            found, what = float(held), "of the newest queries' attention"
            self.watches = False
        elif self.fidelity == "proxy":
            found, what = keep.shape[-1] / self.offset, "of all tokens"
        else:
            self.watches = False
            return
        self.newest.forget()
        if found >= least:
            return
        self.watches = False
        told = (
            f"the {keep.shape[-1]} rows that qfilters keeps of {self.offset} hold {found:.2f} "
            f"{what}, less than qfilters_min_retention={least}; "
            f"{_ADVICE[self.filter_scorer.source]} or raise qfilters_budget"
        )
        if self.on_low_retention == "raise":
            raise QuantizerConfigError(told)
        _log.warning("%s", told)

    def extra_arrays(self) -> Iterator[mx.array]:
        """Columns, the scorer's, and the queries that the guard is to look at."""
        yield from super().extra_arrays()
        yield from self.newest.arrays()

    def extra_state(self) -> list[Any]:
        """As every evicting cache, and whether the guard still watches."""
        return [*super().extra_state(), self.watches]

    def restore_extra(self, saved: list[Any]) -> None:
        """Take back what `extra_state` gave."""
        super().restore_extra(saved[:-1])
        self.watches = bool(saved[-1])


_ADVICE: dict[str, str] = {
    "calibration": "calibrate on a text like yours",
    "queries": "calibrate the model with `vq precompute --method qfilters`",
    "keys": "calibrate the model with `vq precompute --method qfilters`",
}


def mean_filters(vectors: mx.array, n_kv_heads: int) -> mx.array:
    """Direction that the vectors (B, Hq, N, D) of each KV head share, (B, H, D) fp32."""
    batch, heads, count, dim = vectors.shape
    each = compute_qfilters(vectors.reshape(batch * heads, count, dim))
    return average_gqa_filters(each, batch * n_kv_heads).reshape(batch, n_kv_heads, dim)


def fit(sample: LayerSample, config: KVCacheConfig) -> dict[str, mx.array]:
    """Filters (H, D) of one layer.

    Raises:
        QuantizerConfigError: when the model computes attention itself.
    """
    del config
    if sample.queries is None:
        raise QuantizerConfigError(
            "this model computes attention itself, so its queries cannot be seen; "
            "qfilters works on it without a calibration, with keys alone"
        )
    filters = compute_qfilters(sample.queries)
    return {"filters": average_gqa_filters(filters, sample.shape.n_kv_heads)}


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> QFiltersKVCache:
    """The cache of one layer.

    Raises:
        QuantizerConfigError: when a calibration is of another shape.
    """
    filters = (context.artifacts or {}).get("filters")
    if filters is not None and tuple(filters.shape) != (shape.n_kv_heads, shape.k_dim):
        raise QuantizerConfigError(
            f"filters of shape {tuple(filters.shape)} do not fit {shape.n_kv_heads} KV heads of "
            f"{shape.k_dim} channels; calibrate this model again"
        )
    return QFiltersKVCache(config, shape, filters)
