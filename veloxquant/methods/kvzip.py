"""kvzip: tokens stay that the context needs to repeat itself.

A token counts by the strongest attention that any query gives it, over the query heads of its KV
head; the question that comes later plays no part. Whose queries is `kvzip_probe`:
"context", the prompt's own while it is read, each query looking at rows at least two behind it
(the diagonal and its neighbour saturate); it costs one more product of queries and keys;
"reconstruct", the model's when it is asked to repeat the prompt, piece by piece: that takes a
second pass, which `kvzip_compress` runs after the prompt was read. Where nobody calls it, the
prompt's own queries decide and `fidelity` says `proxy`.
When a prompt is complete the first `kvzip_n_sink` rows, the newest two and the best others stay,
`kvzip_budget` in all; decoded tokens are appended and never evicted. Ties keep the earlier row.
`kvzip_scope` says among which rows the best are sought: "head", those of each KV head, so that all
keep as many; "model", as in the paper, those of all heads and layers, which then keep unequal
numbers of mean `kvzip_budget`. That happens once a sequence, and needs the attention hook.
Source: Kim et al., KVzip, 2025, arXiv 2505.23416. Differs: rows of a layer are rounded to a whole
number a head; scope "head" by default. The "context" probe is a cheaper and weaker method than the
paper's; its published figures are those of "reconstruct".
Without true queries the score is KeyDiff's (arXiv 2504.15364) and the cache says `proxy`, as it
does where scope "model" cannot be had and heads keep equal numbers.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from veloxquant.cache.attention_rows import logit_rows, query_blocks, row_weights
from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import Policy
from veloxquant.cache.layer_board import LayerBoard, join, joined_board
from veloxquant.cache.pooled_cache import PooledHeadsCache
from veloxquant.cache.pooled_heads import competing_rows
from veloxquant.cache.repetition import compress
from veloxquant.cache.scorers import CumulativeAttention, Recency
from veloxquant.cache.shared_threshold import own_share, post
from veloxquant.config.checks.eviction_pages import KVZIP_NEIGHBOURS
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers.sizes import LayerShape


class StrongestAttention(CumulativeAttention):
    """Largest attention of any query at least `KVZIP_NEIGHBOURS` rows behind: column "mass"."""

    def __init__(self) -> None:
        super().__init__("max", "max")

    def judged_elsewhere(self) -> None:
        """The column will hold what other queries give; those of the prompt are forgotten."""
        self.ring.forget()
        self.queries_seen = 1

    def weigh(self, logits: mx.array, sinks: mx.array | None) -> mx.array:
        """Softmax, without what a query gives itself and its neighbour."""
        weights = super().weigh(logits, sinks)
        count, n = logits.shape[-2:]
        own = mx.arange(n - count, n)[:, None]
        return mx.where(mx.arange(n)[None] <= own - KVZIP_NEIGHBOURS, weights, 0.0)


class KVzipKVCache(PooledHeadsCache):
    """Rows with the strongest attention that each one got."""

    equal_heads = "kvzip_scope='head'"

    def __init__(
        self, config: KVCacheConfig, shape: LayerShape, board: LayerBoard, place: int
    ) -> None:
        policy = Policy(
            config.kvzip_budget, config.kvzip_n_sink, KVZIP_NEIGHBOURS, trigger="prompt_end"
        )
        self.attention = StrongestAttention()
        super().__init__(shape, config.method, policy, self.attention)
        self.probe = config.kvzip_probe
        self.board, self.place = board, place
        self.competes = config.kvzip_scope == "model"
        self.divided = False
        """Whether rows were shared among all heads, which happens once."""
        self._probed: tuple[int, int, int] | None = None
        self.repeated = False
        """Whether the scores are those of a repetition."""

    @property
    def kvzip_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes

    # ---- tokens out ---------------------------------------------------------------------

    def _shrink(self, budget: int) -> None:
        if self.divided or self.rows <= budget:
            return
        share = budget
        pooled = self.competes and self.returns == "views"
        if pooled:
            found = own_share(self.board, self.place, self.offset, budget, self._forced)
            share = budget if found is None else found
            pooled = found is not None
        before = self.evicted
        super()._shrink(share)
        repeated = self.probe != "reconstruct" or self.repeated
        if self.evicted > before and not (repeated and pooled == self.competes):
            self.fidelity = "proxy"
        if self.competes and self.returns == "views":
            self._rest()

    def _rest(self) -> None:
        """Nothing is scored any more."""
        self.divided = True
        self.attention.ring.forget()
        self.scorer = Recency()
        self.columns.pop("mass", None)

    def select(self, scores: mx.array, budget: int) -> mx.array:
        """As every evicting cache; in the scope of the model, (B, H·budget) rows of all heads."""
        if not self.competes or self.returns != "views" or scores.shape[1] == 1:
            return super().select(scores, budget)
        return competing_rows(self._forced(scores), budget, self.policy.n_sink, 0)

    def _forced(self, scores: mx.array) -> mx.array:
        """Scores with those of rows that stay in any case at +inf."""
        n = scores.shape[-1]
        places = mx.arange(n)
        forced = (places < self.policy.n_sink) | (places >= n - self.policy.n_recent)
        return mx.where(forced, mx.inf, scores)

    def _post(self) -> None:
        """Tell the other layers this one's scores, when the prompt is complete."""
        alone = not self.competes or self.divided or self._known_shape()[0] > 1
        if not alone and self.rows > self.policy.budget:
            post(self.board, self.place, self.offset, self.scorer.score(self))

    def settle(self) -> None:
        """Give up rows once the prompt is complete; the next one has to be repeated anew."""
        due = self._due
        super().settle()
        if due:
            self.repeated = False

    # ---- the pass that repeats the prompt -----------------------------------------------

    def begin_probe(self, start: int, stop: int) -> None:
        """Score rows [start, stop) by the queries that come until `end_probe`.

        Raises:
            CacheStateError: when rows are missing, so that they cannot be scored.
        """
        self.commit()
        if self.evicted or self.divided or not 0 <= start < stop <= self.rows:
            raise CacheStateError(
                f"rows {start} to {stop} cannot be scored: {self.rows} rows are held and "
                f"{self.evicted} were given up; repeat a prompt before its tokens are evicted"
            )
        if not self.repeated:
            self.repeated = True
            self.attention.judged_elsewhere()
            self.columns["mass"] = mx.zeros_like(self.columns["mass"])
        self._probed = (start, stop, self.rows)

    def end_probe(self) -> None:
        """Take the probe's rows back; the cache is as before but for its scores."""
        assert self._probed is not None
        self.commit()  # packed rows of the probe may still be pending
        held, self._probed = self._probed[2], None
        extra = self.rows - held
        self.key_rows.trim(extra)
        self.value_rows.trim(extra)
        self.offset -= extra
        self.columns = {name: mx.contiguous(a[..., :held]) for name, a in self.columns.items()}
        mx.eval(list(self.arrays()))
        self._unevaluated = []
        self._post()

    def prune(self) -> None:
        """Give up the rows beyond the budget now, as after the prompt's end."""
        self._in_prompt, self._due = False, True
        self.settle()

    def _arrived(self, keys: mx.array, count: int) -> None:
        if self._probed is None:
            super()._arrived(keys, count)
            return
        self.scorer.append(self, keys)

    def observe(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> None:
        """Show the scorer the queries, or score the rows that the probe repeats."""
        if self._probed is None:
            super().observe(queries, scale, sinks)
            if self._due:
                self._post()
            return
        start, stop, held = self._probed
        kept = min(self.policy.n_sink, start)
        keys = self.keys()
        count = queries.shape[2]
        own = self.rows - count
        # Sinks, the piece that is repeated, and the probe: no other piece enters the softmax.
        seen = mx.concatenate(
            [keys[:, :, :kept], keys[:, :, start:stop], keys[:, :, held:]], axis=2
        )
        before = kept + stop - start
        best = self.columns["mass"][..., start:stop]
        for first, block in query_blocks(queries):
            last = before + own - held + first + block.shape[2]
            logits = logit_rows(block, seen[:, :, :last], scale, last - block.shape[2])
            weights = row_weights(logits, sinks)[..., kept:before]
            best = mx.maximum(best, weights.max(axis=(2, 3)))
        mass = self.columns["mass"]
        self.columns["mass"] = mx.concatenate([mass[..., :start], best, mass[..., stop:]], axis=-1)
        self._unevaluated.extend(self.extra_arrays())

    def extra_state(self) -> list[Any]:
        """As every evicting cache, whether a repetition scored, and whether rows are shared out."""
        return [*super().extra_state(), self.repeated, self.divided]

    def restore_extra(self, saved: list[Any]) -> None:
        """Take back what `extra_state` gave."""
        if saved[-1]:
            self._rest()
        super().restore_extra(saved[:-2])
        self.repeated = bool(saved[-2])


def kvzip_compress(model: Any, caches: list[Any], context_ids: list[int], tokenizer: Any) -> None:
    """Let the model repeat a prompt it has read, and evict what it did not need for that.

    Call it after the prompt went through the model and before the first new token; it takes about
    twice the prompt's own time. The caches then hold `kvzip_budget` rows a KV head.

    Args:
        model: the mlx-lm model that read the prompt.
        caches: its caches from `for_model`, of method "kvzip" with `kvzip_probe="reconstruct"`.
        context_ids: the prompt's tokens, all of them.
        tokenizer: the model's tokenizer.

    Raises:
        CacheStateError: when the caches do not hold exactly this prompt, or others beside them
            cannot be rewound.
    """
    ours = [c for c in caches if isinstance(c, KVzipKVCache)]
    if not ours or any(c.probe != "reconstruct" for c in ours):
        raise CacheStateError(
            "repeating a prompt needs caches of method 'kvzip' with kvzip_probe='reconstruct'"
        )
    if any(c.returns != "views" for c in ours):
        raise CacheStateError(
            "this model computes attention itself, so the queries of a repetition cannot be seen; "
            "use kvzip_probe='context'"
        )
    compress(model, caches, ours, context_ids, tokenizer)


def layer_groups(config: KVCacheConfig, n_layers: int) -> Sequence[Sequence[int]]:
    """All layers share the rows in the scope of the model."""
    if config.kvzip_scope == "model":
        return [range(n_layers)]
    return [range(i, i + 1) for i in range(n_layers)]


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> KVzipKVCache:
    """The cache of one layer, among those of its sequence."""
    board, place = joined_board(context.group)
    cache = KVzipKVCache(config, shape, board, place)
    join(context.group, cache)
    return cache
