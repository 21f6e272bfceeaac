"""Runs of neighbouring rows that stay or go together."""

import mlx.core as mx

from veloxquant.cache.layouts.eviction_prompt import ChunkRule
from veloxquant.cache.selection import select_rows


def best_chunks(rule: ChunkRule, scores: mx.array, budget: int) -> mx.array:
    """Rows of the best chunks by mean score, and those that stay in any case.

    Args:
        rule: what a chunk is.
        scores: (B, H, n) fp32, larger is better; n more than the budget.
        budget: most rows.

    Returns:
        (B, H, kept) int32 ascending; the earlier of equal chunks.
    """
    batch, heads, n = scores.shape
    first, stop = rule.first, n - rule.n_recent - rule.tail(n)
    means = scores[..., first:stop].reshape(batch, heads, -1, rule.size).mean(axis=-1)
    best = select_rows(means, rule.chunks(n, budget), 0, 0)
    rows = best[..., None] * rule.size + mx.arange(first, first + rule.size, dtype=mx.int32)
    front, back = mx.arange(first, dtype=mx.int32), mx.arange(stop, n, dtype=mx.int32)
    parts = [
        mx.broadcast_to(front, (batch, heads, first)),
        rows.reshape(batch, heads, -1),
        mx.broadcast_to(back, (batch, heads, n - stop)),
    ]
    return mx.concatenate(parts, axis=-1)
