"""pyramidkv: snapkv with more rows in the first layers and fewer in the last.

Budgets fall along an arithmetic progression whose mean is `pyramid_budget`; the last layer gets
about the part 1/`pyramid_beta` of it. Which prompt tokens a layer keeps is decided as in snapkv:
attention of the last 32 queries, averaged over 5 neighbours and over the query heads of a KV head.
Source: Cai et al., PyramidKV, 2024, arXiv 2406.02069; window and kernel of the official code's
class. Differs: a gentler beta (2 where the paper has 20), sinks, exact totals, and no other
schedule for prompts that the first layers would keep whole: those keep all, the last layers do not.
`pyramid_resolved_budget` sets the rows of every layer outright. A layer by itself gets the mean.
Without true queries the score is KeyDiff's (arXiv 2504.15364) and the cache says `proxy`.
"""

from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import Policy
from veloxquant.cache.layer_budget import LayerBudgetCache
from veloxquant.cache.layouts.eviction_prompt import PROMPT_WINDOW
from veloxquant.cache.layouts.in_model import pyramid_rows
from veloxquant.cache.scorers import WindowAttention
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape

POOL_KERNEL = 5


class PyramidKVCache(LayerBudgetCache):
    """The prompt is compressed once it is complete, to this layer's budget."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, budget: int) -> None:
        policy = Policy(
            budget, config.pyramid_n_sink, PROMPT_WINDOW, trigger="prompt_end", later_wins=True
        )
        super().__init__(shape, config.method, policy, WindowAttention(PROMPT_WINDOW, POOL_KERNEL))

    # ---- counters of the documents ------------------------------------------------------

    @property
    def pyramid_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> PyramidKVCache:
    """The cache of one layer, with its place's share of the rows."""
    budget = config.pyramid_resolved_budget
    if budget is None:
        budget = pyramid_rows(config, context.n_layers)[context.layer]
    return PyramidKVCache(config, shape, budget)
