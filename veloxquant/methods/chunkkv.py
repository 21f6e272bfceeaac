"""chunkkv: runs of `chunkkv_chunk_size` prompt tokens stay or go as a whole.

When a prompt is complete, a run's score is the mean over its tokens of the attention that the last
32 queries give them, summed over all heads: one list of runs for the whole layer. The best runs
stay, with those of the first `chunkkv_n_sink` tokens, the last 32 tokens and what lies between them
and the last whole run: `chunkkv_budget` rows, or up to a run less. Decoded tokens are appended.
`chunkkv_score` "key_norm" (small keys first) and "keydiff" (unusual keys first) need no queries.
With `chunkkv_reuse_layers` above 1 the first of so many layers chooses for the others of its group.
Source: Liu et al., ChunkKV, 2025, arXiv 2502.00299; reduction over heads as in kvpress. Differs:
sinks and window count in the budget; the broken run before the window always stays.
Without true queries the score is KeyDiff's (arXiv 2504.15364) and the cache says `proxy`.
"""

from collections.abc import Sequence

import mlx.core as mx

from veloxquant.cache.board_coordinators import ChunkKVIndexReuseCoordinator
from veloxquant.cache.chunks import best_chunks
from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import EvictingCache, Policy
from veloxquant.cache.layer_board import LayerBoard, join, seat_of
from veloxquant.cache.layouts.eviction_prompt import PROMPT_WINDOW, chunk_rule
from veloxquant.cache.scorers import Rows, Scorer, WindowAttention, key_difference
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape


class SharedAttention(WindowAttention):
    """Attention of the window, summed over heads: one list for all."""

    def __init__(self) -> None:
        super().__init__(PROMPT_WINDOW, group="sum")

    def score(self, rows: Rows) -> mx.array:
        """(B, 1, n)."""
        return super().score(rows).sum(axis=1, keepdims=True)

    def proxy(self, rows: Rows) -> mx.array:
        """The keys' geometry."""
        return SharedDifference().score(rows)


class SharedNorm(Scorer):
    """Small keys are better, summed over heads."""

    def score(self, rows: Rows) -> mx.array:
        """(B, 1, n)."""
        norms = mx.linalg.norm(rows.keys().astype(mx.float32), axis=-1)
        return -norms.sum(axis=1, keepdims=True)


class SharedDifference(Scorer):
    """Keys far from the mean direction are better, summed over heads."""

    def score(self, rows: Rows) -> mx.array:
        """(B, 1, n)."""
        return key_difference(rows.keys()).sum(axis=1, keepdims=True)


SCORERS = {"attn_mass": SharedAttention, "key_norm": SharedNorm, "keydiff": SharedDifference}


class ChunkKVCache(EvictingCache):
    """The prompt is compressed by runs once it is complete."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, board: LayerBoard, place: int):
        self.rule = chunk_rule(config)
        policy = Policy(
            config.chunkkv_budget, config.chunkkv_n_sink, PROMPT_WINDOW, trigger="prompt_end"
        )
        super().__init__(shape, config.method, policy, SCORERS[config.chunkkv_score]())
        self.board = board
        self.place = place

    @classmethod
    def by_hand(
        cls,
        config: KVCacheConfig,
        layer_id: int | None = None,
        coordinator: ChunkKVIndexReuseCoordinator | None = None,
    ) -> tuple[KVCacheConfig, LayerContext]:
        """Settings and place of a layer made by hand: one by itself without a coordinator.

        Blocks of layers are the coordinator's, not those of `chunkkv_reuse_layers`.

        Raises:
            ValueError: for a layer that the coordinator does not know.
        """
        seat = coordinator.seat(config, layer_id) if coordinator is not None else None
        return config, LayerContext(layer_id or 0, seed=config.seed, seat=seat)

    def _shrink(self, budget: int) -> None:
        super()._shrink(self.rule.kept(self.rows, budget))

    def select(self, scores: mx.array, budget: int) -> mx.array:
        """The first layer's rows if it chose among as many, else this layer's best runs."""
        asked = (self.offset, self.rows, scores.shape[0])
        told = self.board.notes.get(0)
        if self.place and told is not None and told[0] == asked:
            if self.place == self.board.size - 1:
                self.board.notes.clear()
            return told[1]
        keep = best_chunks(self.rule, scores, budget)
        if self.is_index_reuse_leader:
            self.board.notes[0] = (asked, keep)
        return keep

    # ---- counters of the documents ------------------------------------------------------

    @property
    def layer_budget(self) -> int:
        """Rows of a compressed prompt at most."""
        return self.policy.budget

    @property
    def chunk_size(self) -> int:
        """Tokens of a run."""
        return self.rule.size

    @property
    def is_index_reuse_leader(self) -> bool:
        """Whether other layers take over this one's choice."""
        return self.place == 0 and self.board.size > 1

    @property
    def chunkkv_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes


def layer_groups(config: KVCacheConfig, n_layers: int) -> Sequence[Sequence[int]]:
    """Layers that share a choice: runs of `chunkkv_reuse_layers`."""
    size = config.chunkkv_reuse_layers
    return [range(i, min(i + size, n_layers)) for i in range(0, n_layers, size)]


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> ChunkKVCache:
    """The cache of one layer, in its group."""
    board, place = seat_of(context)
    cache = ChunkKVCache(config, shape, board, place)
    join(context.group, cache)
    return cache
