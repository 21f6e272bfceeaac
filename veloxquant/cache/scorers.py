"""Scores of stored tokens: how much the model's queries, or the keys' geometry, want each one."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Protocol

import mlx.core as mx

from veloxquant.cache.attention_rows import (
    QUERY_BLOCK,
    logit_rows,
    query_blocks,
    row_weights,
    softmax_beside,
)
from veloxquant.cache.queries import QueryRing
from veloxquant.cache.selection import average_pool, max_pool

Needs = Literal["none", "last", "window", "all"]
Reduce = Literal["mean", "sum", "max"]


class Rows(Protocol):
    """What a scorer sees of the cache.

    `columns` are numbers of every row with the row axis last, (B, H or 1, ..., n): the cache picks
    and saves them with the rows, scorers fill them.
    """

    columns: dict[str, mx.array]

    @property
    def rows(self) -> int:
        """Rows held."""
        ...

    def keys(self, stop: int | None = None) -> mx.array:
        """Keys of the first `stop` rows, (B, H, n, D)."""
        ...

    def values(self, stop: int | None = None) -> mx.array:
        """Values of the first `stop` rows."""
        ...


class Scorer:
    """Gathers what it needs from new rows and queries, and gives one score per stored row.

    `needs` says which true queries it reads; a `static` score of a row never changes, so that rows
    may go at any time without changing which ones stay in the end.
    """

    needs: ClassVar[Needs] = "none"
    static: ClassVar[bool] = False

    def append(self, rows: Rows, keys: mx.array) -> None:
        """Rows with these keys (B, H, L, D) were added; scorers with columns add their entries."""

    def observe(
        self, rows: Rows, queries: mx.array, scale: float, sinks: mx.array | None = None
    ) -> None:
        """Look at the queries (B, Hq, L, D) of the newest rows.

        `sinks` (Hq,) are the layer's logits that join the softmax's denominator only.
        """

    @property
    def ready(self) -> bool:
        """Whether the queries it needs were seen."""
        return self.needs == "none"

    def score(self, rows: Rows) -> mx.array:
        """(B, H or 1, n) fp32, larger is better; rows that are kept in any case may say anything.

        One list for all heads if the second axis is 1.
        """
        raise NotImplementedError

    def proxy(self, rows: Rows) -> mx.array:
        """As `score` where the model's queries cannot be seen."""
        return key_difference(rows.keys())

    def rewind(self, n: int) -> None:
        """The newest `n` rows are taken back."""

    def forget(self) -> None:
        """A prompt was compressed; what was gathered for it can go."""

    def arrays(self) -> Iterator[mx.array]:
        """Arrays held besides columns."""
        return iter(())

    def saved(self) -> list[Any]:
        """What `arrays` needs to be saved."""
        return []

    def restore(self, saved: list[Any]) -> None:
        """Take back what `saved` gave."""


class Recency(Scorer):
    """Later rows are better."""

    static: ClassVar[bool] = True

    def score(self, rows: Rows) -> mx.array:
        """The row's index, one list for all heads."""
        batch = rows.keys(1).shape[0]
        return mx.broadcast_to(mx.arange(rows.rows, dtype=mx.float32), (batch, 1, rows.rows))


class KeyScore(Scorer):
    """A number of each key that never changes, computed once when the row comes."""

    static: ClassVar[bool] = True

    def rate(self, keys: mx.array) -> mx.array:
        """(B, H, L, D) to (B, H, L) fp32."""
        raise NotImplementedError

    def append(self, rows: Rows, keys: mx.array) -> None:
        """Rate the new rows."""
        new, old = self.rate(keys), rows.columns.get("score")
        rows.columns["score"] = new if old is None else mx.concatenate([old, new], axis=-1)

    def score(self, rows: Rows) -> mx.array:
        """The column."""
        return rows.columns["score"]


class KeyNorm(KeyScore):
    """Minus the key's length if `low`, else the length."""

    def __init__(self, *, low: bool = True) -> None:
        self.sign = -1.0 if low else 1.0

    def rate(self, keys: mx.array) -> mx.array:
        """Length in fp32: a half's squares overflow."""
        return self.sign * mx.linalg.norm(keys.astype(mx.float32), axis=-1)


class QueryScorer(Scorer):
    """Base of scorers that read the newest queries when rows are picked."""

    def __init__(self, window: int | None) -> None:
        self.ring = QueryRing(window)

    @property
    def ready(self) -> bool:
        """Whether any query was seen."""
        return self.ring.queries is not None

    def observe(
        self, rows: Rows, queries: mx.array, scale: float, sinks: mx.array | None = None
    ) -> None:
        """Keep the newest."""
        del rows
        self.ring.push(queries, scale, sinks)

    def rewind(self, n: int) -> None:
        """Queries of the rows taken back go too."""
        self.ring.rewind(n)

    def arrays(self) -> Iterator[mx.array]:
        """The ring."""
        return self.ring.arrays()

    def saved(self) -> list[Any]:
        """The ring."""
        return self.ring.saved()

    def restore(self, saved: list[Any]) -> None:
        """Take back what `saved` gave."""
        self.ring.restore(saved)

    def window_logits(self, rows: Rows, dtype: mx.Dtype = mx.float32) -> mx.array:
        """Logits of the ring's queries, the last of which belongs to the last row."""
        queries = self.ring.queries
        assert queries is not None
        first = rows.rows - queries.shape[2]
        return logit_rows(queries, rows.keys(), self.ring.scale, first, dtype)

    def weigh(self, logits: mx.array, sinks: mx.array | None) -> mx.array:
        """Weights of masked logits (B, H, G, R, n) beside the sinks (Hq,), where there are any."""
        return row_weights(logits, sinks)


class WindowAttention(QueryScorer):
    """Attention of the last `window` queries: summed, group by group, pooled along the sequence.

    Source: SnapKV (arXiv 2404.14469), sections 3 and 4; the group mean is that of kvpress, since
    one selection a KV head keeps grouped-query memory. The window's own rows score 0: policies
    with this scorer keep them.

    Args:
        window: queries kept.
        kernel: neighbours pooled; 1 for none.
        pool: "mean" or "max" of neighbours.
        group: how query heads of one KV head make one score.
        dtype: name of the type of the products; softmax is fp32.
    """

    needs: ClassVar[Needs] = "window"

    def __init__(
        self,
        window: int,
        kernel: int = 1,
        *,
        pool: Literal["mean", "max"] = "mean",
        group: Reduce = "mean",
        dtype: str = "float32",
    ) -> None:
        super().__init__(window)
        self.kernel = kernel
        self.pool = max_pool if pool == "max" else average_pool
        self.group: Reduce = group
        self.dtype = dtype

    def score(self, rows: Rows) -> mx.array:
        """Pooled attention mass of rows before the window."""
        logits = self.window_logits(rows, getattr(mx, self.dtype))
        mass = self.weigh(logits, self.ring.sinks).sum(axis=-2)
        before = rows.rows - self.ring.length
        out = self.pool(reduce(mass, 2, self.group)[..., :before], self.kernel)
        return mx.pad(out, [(0, 0), (0, 0), (0, self.ring.length)])

    def forget(self) -> None:
        """The next prompt brings queries of its own."""
        self.ring.forget()


class LastQuery(QueryScorer):
    """Attention of the last query, mean over all heads of the layer: one list for all.

    Source: TOVA (arXiv 2401.06104), section 3.
    """

    needs: ClassVar[Needs] = "last"

    def __init__(self) -> None:
        super().__init__(1)

    def score(self, rows: Rows) -> mx.array:
        """(B, 1, n)."""
        weights = self.weigh(self.window_logits(rows), self.ring.sinks)
        return weights.mean(axis=(1, 2, 3))[:, None]

    def proxy(self, rows: Rows) -> mx.array:
        """The keys' geometry, mean over heads."""
        return key_difference(rows.keys()).mean(axis=1, keepdims=True)


class CumulativeAttention(QueryScorer):
    """Attention that each row got from all queries so far: their sum, or their maximum.

    Queries of a prompt are scored in blocks of `QUERY_BLOCK` from its first one on, however it is
    cut, and the rest with the next single token. Column "mass" (B, H, n).

    Args:
        kind: "sum" or "max" over queries.
        group: how query heads of one KV head make one score.
        decay: factor of a sum per later query; 1 forgets nothing.
    """

    needs: ClassVar[Needs] = "all"

    def __init__(
        self, kind: Literal["sum", "max"] = "sum", group: Reduce = "mean", decay: float = 1.0
    ) -> None:
        super().__init__(None)
        self.kind = kind
        self.group: Reduce = group
        self.decay = decay
        self.queries_seen = 0

    @property
    def ready(self) -> bool:
        """Whether any query was seen."""
        return self.queries_seen > 0 or super().ready

    def append(self, rows: Rows, keys: mx.array) -> None:
        """New rows have got nothing yet."""
        new, old = mx.zeros(keys.shape[:3]), rows.columns.get("mass")
        rows.columns["mass"] = new if old is None else mx.concatenate([old, new], axis=-1)

    def observe(
        self, rows: Rows, queries: mx.array, scale: float, sinks: mx.array | None = None
    ) -> None:
        """Score whole blocks, and everything once a single token comes."""
        super().observe(rows, queries, scale, sinks)
        self._settle(rows, everything=queries.shape[2] == 1)

    def _settle(self, rows: Rows, *, everything: bool) -> None:
        waiting = self.ring.queries
        if waiting is None:
            return
        count, done = waiting.shape[2], 0
        for start, block in query_blocks(waiting):
            if everything or block.shape[2] == QUERY_BLOCK:
                self._add(rows, block, rows.rows - count + start)
                done += block.shape[2]
        if done:
            self.ring.hold(waiting[:, :, done:])

    def _add(self, rows: Rows, queries: mx.array, first: int) -> None:
        count = queries.shape[2]
        stop = first + count
        # Only the rows these queries see: the sums must not depend on what came with them.
        logits = logit_rows(queries, rows.keys(stop), self.ring.scale, first)
        weights = reduce(self.weigh(logits, self.ring.sinks), 2, self.group)
        mass = rows.columns["mass"]
        if self.kind == "max":
            got = mx.maximum(mass[..., :stop], weights.max(axis=-2))
        else:
            if self.decay != 1.0:
                age = mx.arange(count - 1, -1, -1, dtype=mx.float32)
                weights = weights * mx.power(self.decay, age)[:, None]
            got = mass[..., :stop] * self.decay**count + weights.sum(axis=-2)
        later = mass[..., stop:]
        rows.columns["mass"] = mx.concatenate([got, later], axis=-1) if later.size else got
        self.queries_seen += count

    def score(self, rows: Rows) -> mx.array:
        """The column, with every query seen so far."""
        self._settle(rows, everything=True)
        return rows.columns["mass"]

    def saved(self) -> list[Any]:
        """Waiting queries and their number so far."""
        return [*super().saved(), self.queries_seen]

    def restore(self, saved: list[Any]) -> None:
        """Take back what `saved` gave."""
        super().restore(saved[:3])
        self.queries_seen = int(saved[3])


class WindowLogits(QueryScorer):
    """Softmax of the last `window` queries over the candidates only, logits summed by group.

    Candidates are the rows between the first `n_sink` and the last `n_recent`.
    Source: MorphKV (arXiv 2503.00979) and its code's rule for grouped queries.
    """

    needs: ClassVar[Needs] = "window"

    def __init__(self, window: int, n_sink: int, n_recent: int) -> None:
        super().__init__(window)
        self.n_sink = n_sink
        self.n_recent = n_recent

    def score(self, rows: Rows) -> mx.array:
        """Sum over the window of each query's share; 0 for rows that are no candidates."""
        logits = self.window_logits(rows).sum(axis=2)
        candidates = logits[..., self.n_sink : rows.rows - self.n_recent]
        sinks = self.ring.sinks
        edges = None if sinks is None else sinks.reshape(1, logits.shape[1], -1, 1).sum(axis=2)
        shares = softmax_beside(candidates, None if edges is None else edges[..., None])
        shares = shares.sum(axis=-2)
        return mx.pad(shares, [(0, 0), (0, 0), (self.n_sink, self.n_recent)])


def reduce(x: mx.array, axis: int, how: Reduce) -> mx.array:
    """Mean, sum or maximum along an axis."""
    if how == "mean":
        return x.mean(axis=axis)
    return x.sum(axis=axis) if how == "sum" else x.max(axis=axis)


def key_difference(keys: mx.array) -> mx.array:
    """Score without queries: minus the cosine to the mean key direction, (B, H, n) fp32.

    Source: KeyDiff (arXiv 2504.15364); the fallback when the model's queries cannot be seen.
    """
    rows = keys.astype(mx.float32)
    unit = rows / mx.maximum(mx.linalg.norm(rows, axis=-1, keepdims=True), 1e-6)
    mean = unit.mean(axis=2, keepdims=True)
    return -(unit * mean).sum(axis=-1)
