"""cam: rows that go leave their values to survivors.

Who goes is decided as in h2o without decay. A loser's value is added to the survivor with the most
similar key (never a sink), weighted by that similarity (`sim_weighted`) or not (`mean`), and the
sum is divided by its weights; `sequential` is the paper's form, which spreads the value over the 16
survivors that follow and divides nothing. With `cam_merge_gate` a loser is merged with the
probability of its score over its target's, at most 1; a survivor takes over the score as well.
Source: Zhang et al., CaM, ICML 2024, section 4. Differs: default target (nearest key) and
normalisation; a prompt is read whole, then all its losers are merged at once.
`cam_merge_keys` also averages keys, turned to the target's position: it needs the layer's position
encoding. Without true queries scores are KeyDiff's, gates compare key norms, and the cache says
`proxy`.
"""

from typing import Any

import mlx.core as mx

from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import EvictingCache, Policy
from veloxquant.cache.merging import (
    Losers,
    blend,
    blocks_of_losers,
    following,
    gate_probability,
    nearest,
)
from veloxquant.cache.rope import shiftable, turn_rows
from veloxquant.cache.scorers import CumulativeAttention
from veloxquant.cache.selection import left_out
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape

DRAWS_PER_LAYER = 1 << 32


def pick(x: mx.array, index: mx.array) -> mx.array:
    """Rows (B, H, n, D) at (B, H, m)."""
    return mx.take_along_axis(x, index[..., None], axis=2)


class CaMKVCache(EvictingCache):
    """Rows with collected attention; values of survivors carry those of losers."""

    constants = frozenset({"rope"})

    def __init__(self, config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> None:
        policy = Policy(config.cam_budget, config.cam_n_sink, 1, later_wins=True)
        super().__init__(shape, config.method, policy, CumulativeAttention())
        self.merge_mode = config.cam_merge
        self.gated = config.cam_merge_gate
        self.rope = context.rope if config.cam_merge_keys else None
        self.stream = (context.seed + 1) * (1 << 44) + context.layer * DRAWS_PER_LAYER
        self._draws = self.stream

    # ---- merging ------------------------------------------------------------------------

    def take(self, keep: mx.array) -> None:
        """Merge, then let the losers go."""
        keys, values = self.keys(), self.values()
        score = self.columns["mass"] if self.scorer.ready else _lightness(keys)
        kept_keys, kept_values = pick(keys, keep), pick(values, keep)
        kept_score = mx.take_along_axis(score, keep, axis=-1)
        sums = [mx.zeros(a.shape, dtype=mx.float32) for a in (kept_values, kept_keys)]
        weight, mass = mx.zeros(keep.shape), kept_score
        gone = left_out(keep, self.rows)
        self._draws = self.stream + self.evicted - gone.shape[-1]
        for losers in blocks_of_losers(gone):
            lost = pick(keys, losers.places)
            own = mx.take_along_axis(score, losers.places, axis=-1)
            if self.merge_mode == "sequential":
                shares = self._spread(losers, own, kept_score)
                inherits = shares
            else:
                target, cosine = nearest(kept_keys, lost, self.policy.n_sink)
                shares = self._assign(losers, target, cosine, own, kept_score)
                inherits = (shares > 0).astype(mx.float32)
                if self.rope is not None:
                    lost = self._turned(lost, losers, keep, target)
                    sums[1] = sums[1] + shares @ lost.astype(mx.float32)
            sums[0] = sums[0] + shares @ pick(values, losers.places).astype(mx.float32)
            weight = weight + shares.sum(axis=-1)
            mass = mass + (inherits @ own[..., None])[..., 0]
        super().take(keep)
        convex = self.merge_mode != "sequential"
        self.value_rows.replace(blend(kept_values, sums[0], weight, convex=convex))
        if self.rope is not None:
            self.key_rows.replace(blend(kept_keys, sums[1], weight, convex=True))
        if self.scorer.ready:
            self.columns["mass"] = mass

    def _gate(self, losers: Losers, probability: mx.array) -> mx.array:
        """1 or 0 for each loser, alike for all sequences of a batch with equal probabilities."""
        if not self.gated:
            return mx.ones(probability.shape)
        key = mx.random.key((self._draws + losers.first) % (1 << 63))
        draws = mx.random.uniform(shape=(1, *probability.shape[1:]), key=key)
        return (draws < probability).astype(mx.float32)

    def _assign(
        self,
        losers: Losers,
        target: mx.array,
        cosine: mx.array,
        own: mx.array,
        kept_score: mx.array,
    ) -> mx.array:
        """Weight of each loser in its one target, (B, H, k, m)."""
        theirs = mx.take_along_axis(kept_score, target, axis=-1)
        share = self._gate(losers, gate_probability(own, theirs))
        if self.merge_mode == "sim_weighted":
            share = share * mx.maximum(cosine, 0.0)
        slots = mx.arange(kept_score.shape[-1], dtype=mx.int32)[:, None]
        return mx.where(slots == target[..., None, :], share[..., None, :], 0.0)

    def _spread(self, losers: Losers, own: mx.array, kept_score: mx.array) -> mx.array:
        """Equal weights of each loser in the survivors that follow it, (B, H, k, m)."""
        targets = following(losers, kept_score.shape[-1]).astype(mx.float32)
        count = mx.maximum(targets.sum(axis=-2), 1.0)
        mean = (kept_score[..., None, :] @ targets)[..., 0, :] / count
        gate = self._gate(losers, gate_probability(own, mean))
        return targets * (gate / count)[..., None, :]

    def _turned(self, lost: mx.array, losers: Losers, keep: mx.array, target: mx.array) -> mx.array:
        """Lost keys at the positions of their targets."""
        places = self.kept_positions()
        to = mx.take_along_axis(mx.take_along_axis(places, keep, axis=-1), target, axis=-1)
        start = mx.take_along_axis(places, losers.places, axis=-1)
        return turn_rows(self.rope, lost, to - start)

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
