"""The cache of every method that gives up tokens: a scorer, a policy, and what to do with losers.

A step: new rows come, attention reads everything held, the scorer looks at the queries, and rows
beyond the budget go before the next rows come. Attention of a step that evicts is thus exact over
what was held.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from veloxquant.cache.attend import decode_range
from veloxquant.cache.exact import ExactRows
from veloxquant.cache.fitting import check_queries
from veloxquant.cache.scorers import QueryScorer, Scorer
from veloxquant.cache.selection import select_rows
from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers.sizes import LayerShape

POSITIONS = "positions"


@dataclass(frozen=True)
class Policy:
    """How many rows stay, which ones in any case, and when the others go.

    `trigger`: "every_step" holds the budget from the first single token on (a prompt is read whole
    first, unless the score is static); "prompt_end" compresses a prompt once and lets decoded
    tokens add their rows. `n_sink` first and `n_recent` last rows always stay.
    """

    budget: int
    n_sink: int = 0
    n_recent: int = 0
    trigger: Literal["every_step", "prompt_end"] = "every_step"
    later_wins: bool = False


class EvictingCache(ExactRows):
    """Rows with columns of numbers; a scorer rates them and a policy says how many stay."""

    def __init__(self, shape: LayerShape, method: str, policy: Policy, scorer: Scorer) -> None:
        super().__init__(shape, method)
        self.policy = policy
        self.scorer = scorer
        self.columns: dict[str, mx.array] = {}
        self.since_eviction = 0
        self._in_prompt = False
        self._due = False

    # ---- what scorers see ---------------------------------------------------------------

    def keys(self, stop: int | None = None) -> mx.array:
        """Keys of the first `stop` rows, (B, H, n, D); all by default."""
        return self._seen(0, stop)

    def values(self, stop: int | None = None) -> mx.array:
        """Values of the first `stop` rows."""
        return self._seen(1, stop)

    def _seen(self, side: int, stop: int | None) -> mx.array:
        """Rows as they are held, so that a score does not depend on the pieces of a prompt.

        A single new token is seen as it came: it is in a piece of its own, however it is fed.
        """
        runs = self.runs()[side]
        if self.pending is not None and self.pending[side].shape[2] > 1:
            runs[-1] = self.as_held(self.pending[side], side)
        return decode_range(runs, 0, self.rows if stop is None else stop, self._dtype)

    def kept_positions(self) -> mx.array:
        """Absolute positions of the rows held, (B, H or 1, n) int32 ascending."""
        if POSITIONS in self.columns:
            return self.columns[POSITIONS]
        batch, heads, _, _ = self._known_shape()
        places = mx.arange(self.rows, dtype=mx.int32)
        return mx.broadcast_to(places, (batch, heads, self.rows))

    # ---- tokens in ----------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Add rows, and the columns' entries for them."""
        out = super().update_and_fetch(keys, values)
        if count := keys.shape[2]:
            self._arrived(keys, count)
        return out

    def _arrived(self, keys: mx.array, count: int) -> None:
        if (old := self.columns.get(POSITIONS)) is not None:
            new = mx.arange(self.offset - count, self.offset, dtype=mx.int32)
            new = mx.broadcast_to(new, (*old.shape[:2], count))
            self.columns[POSITIONS] = mx.concatenate([old, new], axis=-1)
        self.scorer.append(self, keys)
        self._unevaluated.extend(self.extra_arrays())
        self.since_eviction += count
        if self.policy.trigger == "every_step":
            self._due = count == 1 or self.scorer.static
        elif count > 1:
            self._in_prompt = True
        elif self._in_prompt:
            self._in_prompt, self._due = False, True

    def observe(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> None:
        """Show the scorer the queries of the newest rows."""
        if self.policy.trigger == "every_step" or self._in_prompt or self._due:
            self.scorer.observe(self, queries, scale, sinks)
            self._unevaluated.extend(self.extra_arrays())

    # ---- tokens out ---------------------------------------------------------------------

    def settle(self) -> None:
        """Give up the rows beyond the budget if it is time to."""
        if not self._due:
            return
        self._due = False
        self._shrink(self.policy.budget)
        if self.policy.trigger == "prompt_end":
            self.scorer.forget()

    def make_ready(self, n: int) -> None:
        """In decode the worst row goes before a new one comes, so the budget always holds.

        A static score waits for the new row, which may be the worst itself.
        """
        super().make_ready(n)
        steady = self.policy.trigger == "every_step" and not self.scorer.static
        # More rows than that are a prompt whose last token is to come: it sees all of them.
        if n == 1 and steady and self.rows == self.policy.budget:
            self._shrink(self.policy.budget - 1)

    def _shrink(self, budget: int) -> None:
        if self.rows <= budget:
            return
        self.fidelity = "exact" if self.scorer.ready else "proxy"
        scores = self.scorer.score(self) if self.scorer.ready else self.scorer.proxy(self)
        keep = self.select(scores, budget)
        self.evicted += self.rows - budget
        self.take(keep)
        self.since_eviction = 0
        self._unevaluated = list(self.arrays())

    def select(self, scores: mx.array, budget: int) -> mx.array:
        """Ascending indices (B, H or 1, budget) of the rows that stay."""
        rule = self.policy
        return select_rows(scores, budget, rule.n_sink, rule.n_recent, later_wins=rule.later_wins)

    def take(self, keep: mx.array) -> None:
        """Keep the rows at `keep` (B, H or 1, n), and their columns; merging methods do more."""
        batch, heads, _, _ = self._known_shape()
        if POSITIONS not in self.columns:
            places = mx.arange(self.rows, dtype=mx.int32)
            self.columns[POSITIONS] = mx.broadcast_to(places, (*keep.shape[:2], self.rows))
        for name, column in self.columns.items():
            at = keep if column.ndim == 3 else keep[:, :, None]
            self.columns[name] = mx.contiguous(mx.take_along_axis(column, at, axis=-1))
        index = mx.broadcast_to(keep, (batch, heads, keep.shape[-1]))
        self.key_rows.take(index)
        self.value_rows.take(index)

    def drop(self, n: int) -> int:
        """Rewind: anything before an eviction; later only rows that a prompt's end left alone."""
        tail = self.policy.trigger == "prompt_end"
        if self.evicted and (not tail or n > self.since_eviction):
            return 0
        self.key_rows.trim(n)
        self.value_rows.trim(n)
        rows = self.rows
        self.columns = {
            name: mx.contiguous(column[..., :rows]) for name, column in self.columns.items() if rows
        }
        self.scorer.rewind(n)
        self.since_eviction -= n
        return n

    # ---- state --------------------------------------------------------------------------

    def extra_arrays(self) -> Iterator[mx.array]:
        """Columns and what the scorer holds."""
        yield from self.columns.values()
        yield from self.scorer.arrays()

    def extra_state(self) -> list[Any]:
        """Counters, the state of the prompt, columns, and the scorer's own."""
        counters = [self.evicted, self.since_eviction, self._in_prompt, self._due]
        return [*counters, dict(self.columns), self.scorer.saved()]

    def _check_columns(self, columns: Mapping[str, mx.array]) -> None:
        rows = self.rows
        batch, heads = self._known_shape()[:2] if columns else (1, 1)
        for name, column in columns.items():
            lead = tuple(column.shape[:2])
            if (
                column.ndim < 3
                or column.shape[-1] != rows
                or lead
                not in (
                    (batch, heads),
                    (batch, 1),
                )
            ):
                raise CacheStateError(
                    f"column {name!r} of shape {tuple(column.shape)} does not fit {rows} rows"
                )
        if (places := columns.get(POSITIONS)) is not None and rows:
            inside = (places >= 0) & (places < self.offset)
            if places.dtype != mx.int32 or not inside.all().item():
                raise CacheStateError(
                    f"column {POSITIONS!r} holds more than positions of {self.offset} tokens"
                )

    def restore_extra(self, saved: list[Any]) -> None:
        """Take back what `extra_state` gave.

        Raises:
            CacheStateError: when a column does not fit the rows or tokens.
        """
        evicted, since, in_prompt, due, columns, scorer = saved
        self._check_columns(columns or {})
        self.evicted, self.since_eviction = int(evicted), int(since)
        self._in_prompt, self._due = bool(in_prompt), bool(due)
        self.columns = {name: column[...] for name, column in (columns or {}).items()}
        self.scorer.restore(scorer)
        queries = self.scorer.ring.queries if isinstance(self.scorer, QueryScorer) else None
        if queries is not None:
            check_queries(queries, self._known_shape(), queries.dtype, self.offset)
