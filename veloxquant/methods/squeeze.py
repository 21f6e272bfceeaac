"""squeeze: layers whose attention is most concentrated give rows to the others.

A prompt is read whole. When it is complete, layers are parted into three classes by how
concentrated the attention of the last 32 queries is (one minus the entropy of its mean, over the
logarithm of the tokens). The most concentrated class keeps the part 1 - 0.7·`squeeze_strength` of
`squeeze_budget` rows, the others share what that leaves, so the mean stays. From then on each layer
holds its first `squeeze_n_sink` tokens and the newest ones.
Source: Wang and Gan, SqueezeAttention, 2024, arXiv 2404.04793. Differs: the paper measures how
little attention changes the residual stream, which a cache cannot see; concentration of attention
stands in for it, so the cache says `proxy`. Without queries it is the mean cosine of keys. Classes
start from least, median and largest value instead of at random.
`squeeze_resolved_budget` sets the rows of every layer outright. A layer by itself, and layers of
unlike shapes, get the mean.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import mlx.core as mx

from veloxquant.allocators.layer_budgets import class_budgets
from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import Policy
from veloxquant.cache.layer_board import LayerBoard, join, joined_board
from veloxquant.cache.layer_budget import LayerBudgetCache
from veloxquant.cache.layouts.eviction_prompt import PROMPT_WINDOW, SQUEEZE_ROOM, squeeze_least
from veloxquant.cache.scorers import Needs, QueryScorer, Recency, Rows
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
        weights = mx.softmax(self.window_logits(rows), axis=-1, precise=True).mean(axis=(2, 3))
        entropy = -(weights * mx.log(mx.maximum(weights, 1e-30))).sum(axis=-1)
        return (1.0 - entropy / math.log(max(2, rows.rows))).mean()


class SqueezeAttentionCache(LayerBudgetCache):
    """The whole prompt until all layers have reported, then sinks and newest rows."""

    fidelity: Literal["exact", "proxy"] = "proxy"

    def __init__(self, config: KVCacheConfig, shape: LayerShape, board: LayerBoard, place: int):
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
        self._concentration = 0.0

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

    def observe(self, queries: mx.array, scale: float) -> None:
        """Keep the newest queries until the budget is known, and report after a single token."""
        if self.is_resolved:
            return
        self.scorer.observe(self, queries, scale)
        self._unevaluated.extend(self.extra_arrays())
        if self._due:
            self._report()

    def _report(self) -> None:
        if self.rows > self.least:
            assert isinstance(self.scorer, Concentration)
            value = self.scorer.concentration(self)
            self.board.notes[self.place] = (self.offset, value)
            self._unevaluated.append(value)

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
        board, nobody = self.board, (-1, None, None)
        made: tuple[int, Any, Any] = board.notes.get(BUDGETS, nobody)
        if made[0] != self.offset:
            told = [board.notes.get(i, nobody) for i in range(board.size)]
            if all(note[0] == self.offset for note in told):
                values: Any = mx.stack([note[1] for note in told]).tolist()
                least = self.policy.n_sink + SQUEEZE_ROOM
                budgets = class_budgets(values, self.mean, least, self.strength)
                made = board.notes[BUDGETS] = (self.offset, budgets, values)
        budget = self.mean
        if made[0] == self.offset:
            budget, self._concentration = made[1][self.place], made[2][self.place]
        if self.place == board.size - 1:
            board.notes.clear()
        self.policy = replace(self.policy, budget=budget, trigger="every_step")
        self.scorer.forget()

    def _shrink(self, budget: int) -> None:
        super()._shrink(budget)
        self.fidelity = "proxy"

    # ---- state --------------------------------------------------------------------------

    def extra_state(self) -> list[Any]:
        """Whether the budget is known besides what every evicting cache saves."""
        return [self.is_resolved, *super().extra_state()]

    def restore_extra(self, saved: list[Any]) -> None:
        """Take back what `extra_state` gave."""
        super().restore_extra(saved[1:])
        self.policy = replace(self.policy, trigger="every_step" if saved[0] else "prompt_end")

    # ---- counters of the documents ------------------------------------------------------

    @property
    def concentration(self) -> float:
        """What this layer reported for its budget; 0.0 if that was not here or is still to come."""
        return self._concentration

    @property
    def squeeze_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes


def layer_groups(config: KVCacheConfig, n_layers: int) -> Sequence[Sequence[int]]:
    """All layers share the rows."""
    del config
    return [range(n_layers)]


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> SqueezeAttentionCache:
    """The cache of one layer, among those of its sequence."""
    board, place = joined_board(context.group)
    cache = SqueezeAttentionCache(config, shape, board, place)
    join(context.group, cache)
    return cache
