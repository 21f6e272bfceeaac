"""squeeze: layers whose attention changes the residual stream least give rows to the others.

A prompt is read whole. Meanwhile each layer averages, over the prompt's tokens, the cosine of the
stream before and after its attention. When the prompt is complete, layers are parted into three
classes by it. The class of largest cosines keeps the part 1 - 0.7·`squeeze_strength` of
`squeeze_budget` rows, the others share what that leaves, so the mean stays. From then on each layer
holds its first `squeeze_n_sink` tokens and the newest ones.
Source: Wang and Gan, SqueezeAttention, 2024, arXiv 2404.04793. Differs: classes start from least,
median and largest value instead of at random, and the strength stands for the paper's part.
Where a model's layers do not show the stream, or some token passed unseen, the concentration of
attention decides (of the last 32 queries: one minus the entropy of its mean, over the logarithm of
the tokens; without queries the mean cosine of keys), and the cache says `proxy`.
`squeeze_resolved_budget` sets the rows of every layer outright. A layer by itself, and layers of
unlike shapes, get the mean. Tokens that are taken back before the prompt is complete leave the mean
cosine as it was.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import mlx.core as mx

from veloxquant.cache.board_coordinators import (
    Reported,
    Resolved,
    SqueezeCoordinator,
    agreed,
)
from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import Policy
from veloxquant.cache.layer_board import LayerBoard, join, seat_of
from veloxquant.cache.layer_budget import LayerBudgetCache
from veloxquant.cache.layouts.eviction_prompt import PROMPT_WINDOW, SQUEEZE_ROOM, squeeze_least
from veloxquant.cache.residual import ResidualHook
from veloxquant.cache.scorers import Needs, QueryScorer, Recency, Rows
from veloxquant.cache.stream_cosine import StreamCosine
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.squeeze import mean_cosines

BUDGETS = -1
"""Number of the note with the budgets of all layers."""


class Concentration(QueryScorer):
    """Later rows are better; also says how concentrated attention of the newest queries is."""

    needs: ClassVar[Needs] = "window"
    static: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__(PROMPT_WINDOW)

    def score(self, rows: Rows) -> mx.array:
        """The row's index."""
        return Recency().score(rows)

    def proxy(self, rows: Rows) -> mx.array:
        """The same."""
        return Recency().score(rows)

    def forget(self) -> None:
        """Drop the queries."""
        self.ring.forget()

    def concentration(self, rows: Rows) -> mx.array:
        """Mean over heads, a scalar from 0 (even) to 1 (one token)."""
        if self.ring.queries is None:
            return mean_cosines(rows.keys()).mean()
        weights = self.weigh(self.window_logits(rows), self.ring.sinks).mean(axis=(2, 3))
        entropy = -(weights * mx.log(mx.maximum(weights, 1e-30))).sum(axis=-1)
        return (1.0 - entropy / math.log(max(2, rows.rows))).mean()


class SqueezeAttentionCache(LayerBudgetCache):
    """The whole prompt until all layers have reported, then sinks and newest rows."""

    fidelity: Literal["exact", "proxy"] = "proxy"

    def __init__(
        self,
        config: KVCacheConfig,
        shape: LayerShape,
        board: LayerBoard,
        place: int,
        residual: ResidualHook | None = None,
    ) -> None:
        given = config.squeeze_resolved_budget
        policy = Policy(
            config.squeeze_budget if given is None else given,
            config.squeeze_n_sink,
            1,
            trigger="prompt_end" if given is None else "every_step",
        )
        super().__init__(shape, config.method, policy, Concentration())
        self.mean, self.strength = config.squeeze_budget, config.squeeze_strength
        self.least = squeeze_least(config)
        self.board = board
        self.place = place
        self.cosine = StreamCosine()
        self._residual = residual if given is None else None
        if self._residual is not None:
            self.fidelity = "exact"
        self._concentration = 0.0

    @classmethod
    def by_hand(
        cls,
        config: KVCacheConfig,
        layer_id: int | None = None,
        coordinator: SqueezeCoordinator | None = None,
    ) -> tuple[KVCacheConfig, LayerContext]:
        """Settings and place of a layer made by hand: one by itself without a coordinator.

        Mean rows, sinks and strength are the coordinator's.

        Raises:
            ValueError: for a layer that the coordinator does not know.
        """
        context = LayerContext(layer_id or 0, seed=config.seed)
        if coordinator is None:
            return config, context
        config, seat = coordinator.seat(config, layer_id)
        return config, context._replace(n_layers=coordinator.n_layers, seat=seat)

    @property
    def is_resolved(self) -> bool:
        """Whether this layer's budget is known."""
        return self.policy.trigger == "every_step"

    # ---- reporting ----------------------------------------------------------------------

    def _arrived(self, keys: mx.array, count: int) -> None:
        super()._arrived(keys, count)
        if not self.is_resolved and count == 1:
            self._in_prompt, self._due = False, True
            if self.returns == "arrays":
                self._report()

    def observe(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> None:
        """Keep the newest queries until the budget is known, and report after a single token."""
        if self.is_resolved:
            return
        self.scorer.observe(self, queries, scale, sinks)
        self._unevaluated.extend(self.extra_arrays())
        if self._due:
            self._report()

    def _report(self) -> None:
        if self.rows > self.least:
            assert isinstance(self.scorer, Concentration)
            value = self.scorer.concentration(self)
            self.board.notes[self.place] = Reported(self.offset, value)
            self._unevaluated.append(value)

    @property
    def awaits_cosines(self) -> bool:
        """Whether this layer still averages cosines of its tokens."""
        return self._residual is not None and not self.is_resolved

    def take_cosines(self, cosines: mx.array) -> mx.array:
        """Take those of the newest tokens, (B, L) fp32, which attention has passed by now."""
        total = self.cosine.add(cosines)
        note = self.board.notes.get(self.place)
        if isinstance(note, Reported) and note.offset == self.offset:
            note.cosine = self.cosine.mean(self.offset)
        return total

    def drop(self, n: int) -> int:
        """Rewind, and with the rows their number among the cosines."""
        n = super().drop(n)
        self.cosine.rewind(n)
        return n

    # ---- budgets ------------------------------------------------------------------------

    def settle(self) -> None:
        """Learn the budget at the end of the first prompt that may exceed one, then evict."""
        if self._due and not self.is_resolved:
            if self.rows <= self.least:
                self._due = False
                return
            self._resolve()
        super().settle()

    def _resolve(self) -> None:
        board = self.board
        made = board.notes.get(BUDGETS)
        if not isinstance(made, Resolved) or made.offset != self.offset:
            least = self.policy.n_sink + SQUEEZE_ROOM
            made = agreed(board, self.offset, self.mean, least, self.strength)
            board.outcome = board.notes[BUDGETS] = made
        budget = self.mean
        self.fidelity = "proxy"
        if made is not None:
            budget, self._concentration = made.budgets[self.place], made.values[self.place]
            self.fidelity = "exact" if made.are_cosines else "proxy"
        if self.place == board.size - 1:
            board.notes.clear()
        self.policy = replace(self.policy, budget=budget, trigger="every_step")
        self.scorer.forget()
        self.cosine.forget()
        self._residual = None

    def _shrink(self, budget: int) -> None:
        said = self.fidelity
        super()._shrink(budget)
        self.fidelity = said

    # ---- state --------------------------------------------------------------------------

    def extra_arrays(self) -> Iterator[mx.array]:
        """The sum of cosines besides what every evicting cache holds."""
        yield from super().extra_arrays()
        yield from self.cosine.arrays()

    def extra_state(self) -> list[Any]:
        """Whether the budget is known, and from what, besides what every evicting cache saves."""
        own = [self.is_resolved, self.fidelity, self.cosine.saved()]
        return [*own, *super().extra_state()]

    def restore_extra(self, saved: list[Any]) -> None:
        """Take back what `extra_state` gave."""
        is_resolved, fidelity, cosine = saved[:3]
        super().restore_extra(saved[3:])
        self.policy = replace(self.policy, trigger="every_step" if is_resolved else "prompt_end")
        self.cosine.restore(cosine)
        if is_resolved:
            self._residual = None
            self.fidelity = "exact" if fidelity == "exact" else "proxy"
        elif self.cosine.tokens != self.offset:
            # Tokens that passed unseen cannot be measured any more.
            self._residual, self.fidelity = None, "proxy"

    # ---- counters of the documents ------------------------------------------------------

    @property
    def concentration(self) -> float:
        """What this layer reported for its budget; 0.0 if that was not here or is still to come.

        A mean cosine where `fidelity` is "exact", else a concentration.
        """
        return self._concentration

    @property
    def squeeze_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes


def reads_stream(config: KVCacheConfig) -> bool:
    """Whether layers are to be watched: unless the rows are given."""
    return config.squeeze_resolved_budget is None


def layer_groups(config: KVCacheConfig, n_layers: int) -> Sequence[Sequence[int]]:
    """All layers share the rows."""
    del config
    return [range(n_layers)]


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> SqueezeAttentionCache:
    """The cache of one layer, among those of its sequence."""
    board, place = seat_of(context)
    cache = SqueezeAttentionCache(config, shape, board, place, context.residual)
    join(context.group, cache)
    return cache
