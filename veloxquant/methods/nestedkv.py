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

import mlx.core as mx

from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import Policy
from veloxquant.cache.layouts.eviction_prompt import heads_compete
from veloxquant.cache.pooled_cache import PooledHeadsCache
from veloxquant.cache.pooled_heads import competing_rows
from veloxquant.cache.scorers import Rows, Scorer
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.nestedkv import nestedkv_score
from veloxquant.quantizers.sizes import LayerShape


class NestedAnomaly(Scorer):
    """Anomaly of keys at three scales."""

    def __init__(self, window: int, beta: float, tau: float, kappa: float) -> None:
        self.settings = (window, beta, tau, kappa)

    def score(self, rows: Rows) -> mx.array:
        """(B, H, n)."""
        return nestedkv_score(rows.keys(), *self.settings)


class NestedKVKVCache(PooledHeadsCache):
    """A prompt is compressed once; its rows are a pool of slots that heads share unequally."""

    equal_heads = "nestedkv_safeguard_alpha=1.0"

    def __init__(self, config: KVCacheConfig, shape: LayerShape) -> None:
        policy = Policy(config.nestedkv_budget, config.nestedkv_n_sink, trigger="prompt_end")
        scorer = NestedAnomaly(
            config.nestedkv_window, config.nestedkv_beta, config.nestedkv_tau, config.nestedkv_kappa
        )
        super().__init__(shape, config.method, policy, scorer)
        self.safeguard = int(config.nestedkv_safeguard_alpha * config.nestedkv_budget)
        self.competes = heads_compete(config, shape)

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

    # ---- counters of the documents ------------------------------------------------------

    @property
    def nestedkv_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> NestedKVKVCache:
    """The cache of one layer."""
    return NestedKVKVCache(config, shape)
