"""Exact entries in fixed slots of every token: what a coarse code misses, with its channel.

Slots hold differences, so dense products need no mask and unused slots, zeros, add nothing.
Source: KVQuant (arXiv 2401.18079), section 3.5, with slots of a token instead of row lists.
"""

import mlx.core as mx

from veloxquant.quantizers.base import saturated

_FEW = 6
"""Entries up to which finding one largest after the other beats partitioning a row (measured)."""


def largest(score: mx.array, count: int) -> mx.array:
    """Channels of the `count` largest entries of the last axis, ascending: (..., count) uint32."""
    if count >= score.shape[-1]:
        every = mx.arange(score.shape[-1], dtype=mx.uint32)
        return mx.broadcast_to(every, score.shape)
    if count > _FEW:
        return mx.sort(mx.argpartition(-score, count - 1, axis=-1)[..., :count], axis=-1)
    found = []
    for _ in range(count):
        found.append(mx.argmax(score, axis=-1, keepdims=True))
        score = mx.put_along_axis(score, found[-1], mx.array(-mx.inf), axis=-1)
    return mx.sort(mx.concatenate(found, axis=-1), axis=-1)


def mark(score: mx.array, count: int) -> mx.array:
    """Which entries `largest` picks: bool, of the shape of `score`."""
    none = mx.zeros(score.shape, dtype=mx.bool_)
    return (
        mx.put_along_axis(none, largest(score, count), mx.array(True), axis=-1) if count else none
    )


def missed(x: mx.array, coded: mx.array, at: mx.array, dtype: mx.Dtype) -> mx.array:
    """Differences of `x` to `coded` at channels `at`, in `dtype`."""
    return saturated(mx.take_along_axis(x - coded, at, axis=-1), dtype)


def corrected(coded: mx.array, at: mx.array, delta: mx.array) -> mx.array:
    """fp32 rows `coded` (..., D) with the differences (..., slots) added at their channels."""
    exact = mx.take_along_axis(coded, at, axis=-1) + delta.astype(mx.float32)
    return mx.put_along_axis(coded, at, exact, axis=-1)
