"""Losers merged into survivors: who takes whose row, and in which proportion.

Weights are (B, H, kept, lost) matrices, so that several losers of one survivor add up in any order
and products do the adding. Losers come in blocks, because a prompt may have many.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import mlx.core as mx

from veloxquant.cache.selection import left_out, pick_rows

Merge = Literal["sim_weighted", "mean", "sequential"]
LOSERS_AT_ONCE = 256
SEQUENTIAL_TARGETS = 16
"""Survivors right after a loser that share its value: the official streaming setting."""


class Losers(NamedTuple):
    """A block of rows that go: places (B, H, m) ascending, the first one's number among all."""

    places: mx.array
    first: int


def blocks_of_losers(gone: mx.array) -> Iterator[Losers]:
    """Blocks of at most `LOSERS_AT_ONCE` of (B, H, m) places."""
    for start in range(0, gone.shape[-1], LOSERS_AT_ONCE):
        yield Losers(gone[..., start : start + LOSERS_AT_ONCE], start)


def nearest(kept: mx.array, lost: mx.array, n_sink: int) -> tuple[mx.array, mx.array]:
    """The most similar survivor of every loser, first rows excepted.

    Args:
        kept: (B, H, k, D) keys that stay.
        lost: (B, H, m, D) keys that go.
        n_sink: first survivors, which take nothing.

    Returns:
        Slots (B, H, m) int32 and their cosines (B, H, m) fp32; the earliest of equal ones.
    """
    cosines = _unit(lost) @ _unit(kept).swapaxes(-1, -2)
    slots = mx.arange(kept.shape[2])
    cosines = mx.where(slots >= n_sink, cosines, -mx.inf)
    best = mx.argmax(cosines, axis=-1)
    return best.astype(mx.int32), mx.take_along_axis(cosines, best[..., None], axis=-1)[..., 0]


def following(losers: Losers, kept: int) -> mx.array:
    """Which survivors come right after each loser: (B, H, kept, m) bool, at most 16 of them."""
    count = losers.places.shape[-1]
    before = losers.places - mx.arange(losers.first, losers.first + count, dtype=mx.int32)
    slots = mx.arange(kept, dtype=mx.int32)[:, None]
    start = before[..., None, :]
    return (slots >= start) & (slots < start + SEQUENTIAL_TARGETS)


def gate_probability(lost: mx.array, target: mx.array) -> mx.array:
    """min(lost / target, 1) of non-negative scores; 1 where the target has none."""
    safe = mx.where(target > 0, target, 1.0)
    return mx.where(target > 0, mx.clip(lost / safe, 0.0, 1.0), 1.0)


class Merger(NamedTuple):
    """How losers are merged.

    `gate` turns probabilities (B, H, m) of a block of losers into 1 or 0 each; `turn` brings lost
    keys (B, H, m, D) to the positions of their target slots (B, H, m), None to leave keys alone.
    """

    mode: Merge
    n_sink: int
    gate: Callable[[Losers, mx.array], mx.array]
    turn: Callable[[mx.array, Losers, mx.array], mx.array] | None = None


class Merged(NamedTuple):
    """Survivors with what they took over: keys and values (B, H, k, D), scores (B, H, k).

    `changed` (B, H, k) says whose value is another one now, and key where those are merged.
    """

    keys: mx.array
    values: mx.array
    scores: mx.array
    changed: mx.array


def merge(
    keys: mx.array, values: mx.array, scores: mx.array, keep: mx.array, how: Merger
) -> Merged:
    """Survivors at `keep`, each with its losers' values, in the rows' types.

    Args:
        keys: (B, H, n, D) all rows.
        values: (B, H, n, Dv).
        scores: (B, H, n) non-negative fp32; a survivor takes its losers' over.
        keep: (B, H, k) int32 ascending.
        how: mode, gate, turning of keys.
    """
    kept_keys, kept_values = pick_rows(keys, keep), pick_rows(values, keep)
    kept_scores = mx.take_along_axis(scores, keep, axis=-1)
    key_sum = mx.zeros(kept_keys.shape, dtype=mx.float32)
    value_sum = mx.zeros(kept_values.shape, dtype=mx.float32)
    weight, total = mx.zeros(keep.shape), kept_scores
    for losers in blocks_of_losers(left_out(keep, keys.shape[2])):
        own = mx.take_along_axis(scores, losers.places, axis=-1)
        if how.mode == "sequential":
            inherits = shares = _spread(losers, own, kept_scores, how)
        else:
            lost = pick_rows(keys, losers.places)
            target, cosine = nearest(kept_keys, lost, how.n_sink)
            shares = _assign(losers, target, cosine, own, kept_scores, how)
            inherits = (shares > 0).astype(mx.float32)
            if how.turn is not None:
                key_sum = key_sum + shares @ how.turn(lost, losers, target).astype(mx.float32)
        value_sum = value_sum + shares @ pick_rows(values, losers.places).astype(mx.float32)
        weight = weight + shares.sum(axis=-1)
        total = total + (inherits @ own[..., None])[..., 0]
    divisor = 1.0 if how.mode == "sequential" else (1.0 + weight)[..., None]
    new_values = (kept_values.astype(mx.float32) + value_sum) / divisor
    new_keys = kept_keys
    if how.turn is not None:
        new_keys = ((new_keys.astype(mx.float32) + key_sum) / divisor).astype(keys.dtype)
    return Merged(new_keys, new_values.astype(values.dtype), total, weight > 0)


class Touched(NamedTuple):
    """Survivors that may have taken over the one loser: places (B, H, m) among the survivors.

    `keys`, `values` (B, H, m, D) and `scores` (B, H, m) are theirs now; `changed` (B, H, m) says
    whose are others than before. `keys` is None where those are left alone.
    """

    slots: mx.array
    keys: mx.array | None
    values: mx.array
    scores: mx.array
    changed: mx.array


def merge_one(
    keys: mx.array, values: mx.array, scores: mx.array, keep: mx.array, how: Merger
) -> Touched:
    """As `merge` when one row goes, without copies of all the others: a decoding step.

    Args:
        keys: (B, H, n, D) all rows.
        values: (B, H, n, Dv).
        scores: (B, H, n) non-negative fp32.
        keep: (B, H, n - 1) int32 ascending.
        how: mode, gate, turning of keys.
    """
    kept = keep.shape[-1]
    # Rows before the loser are where they were.
    before = (keep == mx.arange(kept, dtype=mx.int32)).sum(axis=-1, keepdims=True)
    lost = before.astype(mx.int32)
    losers = Losers(lost, 0)
    own = mx.take_along_axis(scores, lost, axis=-1)
    lost_keys, lost_values = pick_rows(keys, lost), pick_rows(values, lost).astype(mx.float32)
    if how.mode == "sequential":
        width = min(SEQUENTIAL_TARGETS, kept)
        slots = mx.minimum(lost, kept - width) + mx.arange(width, dtype=mx.int32)
        follows = slots >= lost
        theirs = mx.take_along_axis(scores, slots + 1, axis=-1)
        count = mx.maximum(follows.sum(axis=-1, keepdims=True), 1).astype(mx.float32)
        mean = mx.where(follows, theirs, 0.0).sum(axis=-1, keepdims=True) / count
        gate = how.gate(losers, gate_probability(own, mean))
        shares = inherits = mx.where(follows, gate / count, 0.0)
    else:
        slots, cosine = _nearest_but_one(keys, lost_keys, lost, how.n_sink)
        theirs = mx.take_along_axis(scores, slots + (slots >= lost), axis=-1)
        shares = how.gate(losers, gate_probability(own, theirs))
        if how.mode == "sim_weighted":
            shares = shares * mx.maximum(cosine, 0.0)
        inherits = (shares > 0).astype(mx.float32)
    at, part = slots + (slots >= lost), shares[..., None]
    divisor = 1.0 if how.mode == "sequential" else 1.0 + part
    new_values = (pick_rows(values, at).astype(mx.float32) + part * lost_values) / divisor
    new_keys = None
    if how.turn is not None and how.mode != "sequential":
        turned = part * how.turn(lost_keys, losers, slots).astype(mx.float32)
        new_keys = (pick_rows(keys, at).astype(mx.float32) + turned) / divisor
        new_keys = new_keys.astype(keys.dtype)
    taken = mx.take_along_axis(scores, at, axis=-1) + inherits * own
    return Touched(slots, new_keys, new_values.astype(values.dtype), taken, shares > 0)


def _nearest_but_one(
    keys: mx.array, lost_keys: mx.array, lost: mx.array, n_sink: int
) -> tuple[mx.array, mx.array]:
    """As `nearest` among all rows but the lost one itself, (B, H, 1)."""
    rows = keys.astype(mx.float32)
    lengths = mx.maximum(mx.linalg.norm(rows, axis=-1), 1e-6)
    cosines = (_unit(lost_keys) @ rows.swapaxes(-1, -2))[..., 0, :] / lengths
    places = mx.arange(keys.shape[2], dtype=mx.int32)
    cosines = mx.where((places >= n_sink) & (places != lost), cosines, -mx.inf)
    best = mx.argmax(cosines, axis=-1, keepdims=True).astype(mx.int32)
    return best - (best > lost), mx.take_along_axis(cosines, best, axis=-1)


def most_changed(losers: int, mode: Merge) -> int:
    """Survivors of a head that so many losers can change."""
    return losers * (SEQUENTIAL_TARGETS if mode == "sequential" else 1)


def _assign(
    losers: Losers,
    target: mx.array,
    cosine: mx.array,
    own: mx.array,
    kept_scores: mx.array,
    how: Merger,
) -> mx.array:
    """Weight of each loser in its one target, (B, H, k, m)."""
    theirs = mx.take_along_axis(kept_scores, target, axis=-1)
    share = how.gate(losers, gate_probability(own, theirs))
    if how.mode == "sim_weighted":
        share = share * mx.maximum(cosine, 0.0)
    slots = mx.arange(kept_scores.shape[-1], dtype=mx.int32)[:, None]
    return mx.where(slots == target[..., None, :], share[..., None, :], 0.0)


def _spread(losers: Losers, own: mx.array, kept_scores: mx.array, how: Merger) -> mx.array:
    """Equal weights of each loser in the survivors that follow it, (B, H, k, m)."""
    targets = following(losers, kept_scores.shape[-1]).astype(mx.float32)
    count = mx.maximum(targets.sum(axis=-2), 1.0)
    mean = (kept_scores[..., None, :] @ targets)[..., 0, :] / count
    gate = how.gate(losers, gate_probability(own, mean))
    return targets * (gate / count)[..., None, :]


def _unit(x: mx.array) -> mx.array:
    x = x.astype(mx.float32)
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-6)
