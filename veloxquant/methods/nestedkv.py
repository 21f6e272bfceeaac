"""nestedkv: prompt tokens whose keys are unusual stay, and heads compete for the rows.

When the first prompt over the budget is complete, each key's anomaly (minus its cosine) is taken
against the mean of all keys, of its block and of the last `nestedkv_window` ones; heads weigh the
three by how well they part tokens, and where they disagree the strongest counts. Every head keeps
the part `nestedkv_safeguard_alpha` of `nestedkv_budget` and the first `nestedkv_n_sink` tokens; the
other rows of the layer go to the best scores of all heads, so heads hold unequal numbers of rows.
That happens once; whatever comes later is appended.
Source: Chen et al., NestedKV, 2026, arXiv 2605.26678, section 3 and appendix A. Differs: the budget
counts rows instead of a share of the prompt.
Packed rows (`eviction_storage`) change heads as they are packed.
Unequal heads need the attention hook. Without it every head keeps `nestedkv_budget` rows (the
paper's form without adaptive heads), and the cache says `proxy`.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from veloxquant.cache.attend import Mask, decode_range
from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import POSITIONS, EvictingCache, Policy
from veloxquant.cache.layouts.eviction_prompt import heads_compete
from veloxquant.cache.pooled_heads import (
    HeadRows,
    competing_rows,
    counts_of,
    pooled_attention,
)
from veloxquant.cache.row_moves import share_rows
from veloxquant.cache.scorers import Rows, Scorer
from veloxquant.cache.view import CacheView
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers.nestedkv import nestedkv_score
from veloxquant.quantizers.sizes import LayerShape


class NestedAnomaly(Scorer):
    """Anomaly of keys at three scales."""

    def __init__(self, window: int, beta: float, tau: float, kappa: float) -> None:
        self.settings = (window, beta, tau, kappa)

    def score(self, rows: Rows) -> mx.array:
        """(B, H, n)."""
        return nestedkv_score(rows.keys(), *self.settings)


class NestedKVKVCache(EvictingCache):
    """A prompt is compressed once; its rows are a pool of slots that heads share unequally.

    `head_rows` (B, H) says how many slots each head has; None while all heads hold the same rows.
    """

    def __init__(self, config: KVCacheConfig, shape: LayerShape) -> None:
        policy = Policy(config.nestedkv_budget, config.nestedkv_n_sink, trigger="prompt_end")
        scorer = NestedAnomaly(
            config.nestedkv_window, config.nestedkv_beta, config.nestedkv_tau, config.nestedkv_kappa
        )
        super().__init__(shape, config.method, policy, scorer)
        self.safeguard = int(config.nestedkv_safeguard_alpha * config.nestedkv_budget)
        self.competes = heads_compete(config, shape)
        self.head_rows: mx.array | None = None

    # ---- tokens out ---------------------------------------------------------------------

    def _shrink(self, budget: int) -> None:
        if self.evicted or self.rows <= budget:
            return
        super()._shrink(budget)
        self.fidelity = "proxy" if self.competes and self.head_rows is None else "exact"

    def select(self, scores: mx.array, budget: int) -> mx.array:
        """As every evicting cache; with competing heads, (B, H·budget) rows of all heads."""
        if self.competes and self.returns == "views":
            return competing_rows(scores, budget, self.policy.n_sink, self.safeguard)
        return super().select(scores, budget)

    def take(self, keep: mx.array) -> None:
        """Keep the rows at `keep`, as the heads' own or as a pool."""
        if keep.ndim == 3:
            super().take(keep)
            return
        batch, heads, _, _ = self._known_shape()
        rows = self.rows
        share_rows(self.key_rows, keep)
        share_rows(self.value_rows, keep)
        self.columns[POSITIONS] = mx.contiguous((keep % rows).reshape(batch, heads, -1))
        self.head_rows = counts_of(keep, heads, rows).astype(mx.int32)

    # ---- attention ----------------------------------------------------------------------

    def attend(
        self,
        queries: mx.array,
        view: CacheView,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
        *,
        owner: bool,
    ) -> mx.array:
        """Attention of every query with its head's slots and later rows.

        Raises:
            CacheStateError: when the cache moved on since the view was made, or the mask is an
                array, which cannot tell unequal heads apart.
        """
        if self.head_rows is None or queries.shape[2] == 0:
            return super().attend(queries, view, scale, mask, sinks, owner=owner)
        if view.shape[2] != self.rows or isinstance(mask, mx.array):
            raise CacheStateError(
                f"the view stands for {view.shape[2]} tokens, the cache holds {self.rows} now, of "
                f"unequal heads; make a new view, and pass no mask array"
            )
        rows = (decode_range(side, 0, self.rows, self._dtype) for side in self.runs())
        sides = [
            HeadRows(x[:, :, : self.policy.budget], x[:, :, self.policy.budget :]) for x in rows
        ]
        out = pooled_attention(queries, sides[0], sides[1], self.head_rows, scale, sinks)
        return self._settled(out)

    def _arrays(self) -> tuple[mx.array, mx.array]:
        if self.head_rows is not None:
            raise CacheStateError(
                "heads of this cache hold unequal numbers of rows, which two arrays cannot say; "
                "attach the attention hook, or set nestedkv_safeguard_alpha=1.0"
            )
        return super()._arrays()

    # ---- state --------------------------------------------------------------------------

    def extra_arrays(self) -> Iterator[mx.array]:
        """The heads' counts too."""
        yield from super().extra_arrays()
        if self.head_rows is not None:
            yield self.head_rows

    def extra_state(self) -> list[Any]:
        """The heads' counts too."""
        return [*super().extra_state(), self.head_rows]

    def restore_extra(self, saved: list[Any]) -> None:
        """Take back what `extra_state` gave.

        Raises:
            CacheStateError: when counts do not fit the pool.
        """
        super().restore_extra(saved[:-1])
        counts = saved[-1]
        if counts is not None:
            batch, heads, _, _ = self._known_shape()
            fits = counts.shape == (batch, heads) and self.rows >= self.policy.budget
            fits = fits and counts.dtype == mx.int32 and (counts >= 0).all().item()
            if not fits or (counts.sum(axis=-1) != heads * self.policy.budget).any().item():
                raise CacheStateError(
                    f"counts of heads in this state do not make {self.policy.budget} rows a head"
                )
        self.head_rows = counts

    # ---- counters of the documents ------------------------------------------------------

    @property
    def nestedkv_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> NestedKVKVCache:
    """The cache of one layer."""
    return NestedKVKVCache(config, shape)
