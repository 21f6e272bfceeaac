"""cam: rows that go leave their values to survivors.

Who goes is decided as in h2o without decay. A loser's value is added to the survivor with the most
similar key (never a sink), weighted by that similarity (`sim_weighted`) or not (`mean`), and the
sum is divided by its weights; `sequential` is the paper's form, which spreads the value over the 16
survivors that follow and divides nothing. With `cam_merge_gate` a loser is merged with the
probability of its score over its target's, at most 1; a survivor takes over the score as well.
Source: Zhang et al., CaM, ICML 2024, section 4. Differs: default target (nearest key) and
normalisation; a prompt is read whole, then all its losers are merged at once.
Packed survivors (`eviction_storage`) are coded anew only when they take something over.
`cam_merge_keys` also averages keys, turned to the target's position: it needs the layer's position
encoding. Without true queries scores are KeyDiff's, gates compare key norms, and the cache says
`proxy`.
"""

from typing import Any, cast

import mlx.core as mx

from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import EvictingCache, Policy
from veloxquant.cache.merging import (
    Losers,
    Merge,
    Merger,
    Touched,
    merge,
    merge_one,
    most_changed,
)
from veloxquant.cache.rope import shiftable, turn_rows
from veloxquant.cache.row_moves import change_rows, write_rows
from veloxquant.cache.scorers import CumulativeAttention
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape

DRAWS_PER_LAYER = 1 << 32


class CaMKVCache(EvictingCache):
    """Rows with collected attention; values of survivors carry those of losers."""

    constants = frozenset({"rope"})

    def __init__(self, config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> None:
        policy = Policy(config.cam_budget, config.cam_n_sink, 1, later_wins=True)
        super().__init__(shape, config.method, policy, CumulativeAttention())
        self.merge_mode: Merge = cast(Merge, config.cam_merge)
        self.gated = config.cam_merge_gate
        self.rope = context.rope if config.cam_merge_keys else None
        self.stream = (context.seed + 1) * (1 << 44) + context.layer * DRAWS_PER_LAYER
        self._draws = self.stream

    # ---- merging ------------------------------------------------------------------------

    def take(self, keep: mx.array) -> None:
        """Merge, then let the losers go."""
        keys = self.keys()
        scores = self.columns["mass"] if self.scorer.ready else _lightness(keys)
        self._draws = self.stream + self.evicted - (self.rows - keep.shape[-1])
        places = self.kept_positions()

        def turned(lost: mx.array, losers: Losers, target: mx.array) -> mx.array:
            to = mx.take_along_axis(mx.take_along_axis(places, keep, axis=-1), target, axis=-1)
            start = mx.take_along_axis(places, losers.places, axis=-1)
            return turn_rows(self.rope, lost, to - start)

        turn = None if self.rope is None else turned
        how = Merger(self.merge_mode, self.policy.n_sink, self._gate, turn)
        if (lost := self.rows - keep.shape[-1]) == 1:
            self._take_one(merge_one(keys, self.values(), scores, keep, how), keep)
            return
        merged = merge(keys, self.values(), scores, keep, how)
        most = most_changed(lost, self.merge_mode)
        super().take(keep)
        change_rows(self.value_rows, merged.values, merged.changed, most)
        if turn is not None:
            change_rows(self.key_rows, merged.keys, merged.changed, most)
        if self.scorer.ready:
            self.columns["mass"] = merged.scores

    def _take_one(self, touched: Touched, keep: mx.array) -> None:
        """Let one loser go, and write the few rows that took over what it held."""
        super().take(keep)
        write_rows(self.value_rows, touched.slots, touched.values, touched.changed)
        if touched.keys is not None:
            write_rows(self.key_rows, touched.slots, touched.keys, touched.changed)
        if self.scorer.ready:
            self.columns["mass"] = mx.put_along_axis(
                self.columns["mass"], touched.slots, touched.scores, axis=-1
            )

    def _gate(self, losers: Losers, probability: mx.array) -> mx.array:
        """1 or 0 for each loser, alike for all sequences of a batch with equal probabilities."""
        if not self.gated:
            return mx.ones(probability.shape)
        key = mx.random.key((self._draws + losers.first) % (1 << 63))
        draws = mx.random.uniform(shape=(1, *probability.shape[1:]), key=key)
        return (draws < probability).astype(mx.float32)

    def extra_state(self) -> list[Any]:
        """With the random stream of the gates."""
        return [*super().extra_state(), self.stream]

    def restore_extra(self, saved: list[Any]) -> None:
        """Take back what `extra_state` gave."""
        super().restore_extra(saved[:-1])
        self.stream = int(saved[-1])

    # ---- counters of the documents ------------------------------------------------------

    @property
    def layer_budget(self) -> int:
        """Rows held at most."""
        return self.policy.budget

    @property
    def cam_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes


def _lightness(keys: mx.array) -> mx.array:
    """Importance without queries: keys of small norm attract attention (arXiv 2406.11430)."""
    return 1.0 / mx.maximum(mx.linalg.norm(keys.astype(mx.float32), axis=-1), 1e-6)


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> CaMKVCache:
    """The cache of one layer.

    Raises:
        QuantizerConfigError: when keys are to be merged and the layer's rotation is unknown.
    """
    if config.cam_merge_keys and not shiftable(context.rope):
        raise QuantizerConfigError(
            "cam_merge_keys=True turns keys to other positions, and the position encoding of this "
            "layer is not known as a pure rotation; leave cam_merge_keys=False"
        )
    return CaMKVCache(config, shape, context)
