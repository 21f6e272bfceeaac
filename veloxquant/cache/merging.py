"""Losers merged into survivors: who takes whose row, and in which proportion.

Weights are (B, H, kept, lost) matrices, so that several losers of one survivor add up in any order
and products do the adding. Losers come in blocks, because a prompt may have many.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import mlx.core as mx

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


def blend(rows: mx.array, sums: mx.array, weight: mx.array, *, convex: bool) -> mx.array:
    """Survivors with their losers in: (rows + sums) / (1 + weight), undivided unless `convex`.

    Args:
        rows: (B, H, k, D) survivors.
        sums: (B, H, k, D) fp32 weighted losers.
        weight: (B, H, k) fp32 their weights.
        convex: whether the result stays between its parts.
    """
    out = rows.astype(mx.float32) + sums
    if convex:
        out = out / (1.0 + weight)[..., None]
    return out.astype(rows.dtype)


def _unit(x: mx.array) -> mx.array:
    x = x.astype(mx.float32)
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-6)
