"""Heads of one layer that hold unequal numbers of rows in one pool of slots.

The pool is rectangular, (B, H, b, D), and read as H·b slots sorted by head and position: head h
owns as many of them as its count says, whichever rows of the rectangle they lie in. So no slot is
padding, and shapes do not depend on the counts. Rows that came later are each head's own.
"""

from typing import NamedTuple

import mlx.core as mx

from veloxquant.cache.plans import SCORE_BYTES
from veloxquant.quantizers.base import compute_dtype


class HeadRows(NamedTuple):
    """Slots of a pool and the rows that came later, of keys or of values, (B, H, n, D)."""

    pool: mx.array
    own: mx.array


def competing_rows(scores: mx.array, budget: int, n_sink: int, safeguard: int) -> mx.array:
    """The best H·budget rows of all heads.

    Args:
        scores: (B, H, n) fp32, larger is better; n at least `budget`. NaN counts as worst.
        budget: mean rows of a head.
        n_sink: first rows that every head keeps.
        safeguard: best rows that every head keeps, sinks included; at most `budget`.

    Returns:
        (B, H·budget) int32 ascending, head h's row i being h·n + i; ties go to earlier heads and
        rows.
    """
    batch, heads, n = scores.shape
    scores = mx.where(mx.isnan(scores), -mx.inf, scores)
    scores = mx.where(mx.arange(n) < n_sink, mx.inf, scores)
    rank = mx.argsort(mx.argsort(-scores, axis=-1), axis=-1)
    scores = mx.where(rank < max(safeguard, n_sink), mx.inf, scores)
    order = mx.argsort(-scores.reshape(batch, heads * n), axis=-1)
    return mx.sort(order[:, : heads * budget].astype(mx.int32), axis=-1)


def counts_of(keep: mx.array, heads: int, n: int) -> mx.array:
    """Slots of each head, (B, H) int32."""
    owners = keep // n
    return (owners[:, None] == mx.arange(heads, dtype=mx.int32)[:, None]).sum(axis=-1)


def owned_slots(counts: mx.array, slots: int) -> mx.array:
    """Which slots belong to which head, (B, H, slots) bool."""
    stop = mx.cumsum(counts, axis=-1)[..., None]
    place = mx.arange(slots, dtype=mx.int32)
    return (place >= stop - counts[..., None]) & (place < stop)


def pooled_attention(
    queries: mx.array,
    keys: HeadRows,
    values: HeadRows,
    counts: mx.array,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of the newest queries with their head's slots and, causally, its later rows.

    Args:
        queries: (B, Hq, L, D); the last one belongs to the last later row.
        keys: slots and later rows of keys.
        values: the same of values.
        counts: (B, H) slots of each head.
        scale: factor on the scores.
        sinks: (Hq,) logits that join the denominator only.

    Returns:
        (B, Hq, L, Dv) in the queries' type.
    """
    batch, n_q, length, dim = queries.shape
    heads, later = keys.own.shape[1], keys.own.shape[2]
    work = compute_dtype(queries.dtype)
    slots = heads * keys.pool.shape[2]
    pool_keys = keys.pool.reshape(batch, slots, dim).astype(work).swapaxes(-1, -2)
    pool_values = values.pool.reshape(batch, slots, -1).astype(work)
    own_keys = keys.own.astype(work).swapaxes(-1, -2)
    own_values = values.own.astype(work)
    mine = owned_slots(counts, slots)[:, :, None, None]
    step = max(1, SCORE_BYTES // (4 * batch * n_q * (slots + later)))
    out = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        count = stop - start
        q = queries[:, :, start:stop].astype(work) * scale
        shape = (batch, heads, n_q // heads, count)
        folded = q.reshape(batch, heads, -1, dim)
        old = (q.reshape(batch, -1, dim) @ pool_keys).astype(mx.float32).reshape(*shape, slots)
        new = (folded @ own_keys).astype(mx.float32).reshape(*shape, later)
        logits = [mx.where(mine, old, -mx.inf), new]
        if length > 1:
            rows = mx.arange(later - length + start, later - length + stop)[:, None]
            logits[1] = mx.where(rows >= mx.arange(later), new, -mx.inf)
        if sinks is not None:
            column = sinks.astype(mx.float32).reshape(1, heads, -1, 1, 1)
            logits.append(mx.broadcast_to(column, (*shape, 1)))
        weights = mx.softmax(mx.concatenate(logits, axis=-1), axis=-1, precise=True).astype(work)
        of_pool = weights[..., :slots].reshape(batch, -1, slots) @ pool_values
        of_own = weights[..., slots : slots + later].reshape(batch, heads, -1, later) @ own_values
        mixed = of_pool.reshape(batch, n_q, count, -1) + of_own.reshape(batch, n_q, count, -1)
        out.append(mixed.astype(queries.dtype))
    return out[0] if len(out) == 1 else mx.concatenate(out, axis=2)
