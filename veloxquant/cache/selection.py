"""Which rows survive: forced rows, then the best scores, ties to the earlier token."""

import mlx.core as mx


def select_rows(scores: mx.array, budget: int, n_sink: int, n_recent: int) -> mx.array:
    """Indices of the rows to keep, ascending.

    Args:
        scores: (B, H, n) fp32, larger is better; NaN counts as worst.
        budget: rows to keep, at most n; at least `n_sink` + `n_recent`.
        n_sink: first rows, always kept.
        n_recent: last rows, always kept.

    Returns:
        (B, H, budget) int32. Equal scores: the earlier row is kept.
    """
    batch, heads, n = scores.shape
    free = budget - n_sink - n_recent
    middle = scores[..., n_sink : n - n_recent]
    middle = mx.where(mx.isnan(middle), -mx.inf, middle)
    # A stable ascending sort of the negated scores keeps earlier rows first among equals.
    best = mx.argsort(-middle, axis=-1)[..., :free].astype(mx.int32) + n_sink
    lead = (batch, heads)
    first = mx.broadcast_to(mx.arange(n_sink, dtype=mx.int32), (*lead, n_sink))
    last = mx.broadcast_to(mx.arange(n - n_recent, n, dtype=mx.int32), (*lead, n_recent))
    return mx.concatenate([first, mx.sort(best, axis=-1), last], axis=-1)


def average_pool(x: mx.array, kernel: int) -> mx.array:
    """Mean over `kernel` neighbours along the last axis; zeros beyond the ends count.

    Sums of shifted copies, so every element is rounded alike wherever it lies.
    """
    half = kernel // 2
    n = x.shape[-1]
    padded = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)])
    total = padded[..., :n]
    for shift in range(1, kernel):
        total = total + padded[..., shift : shift + n]
    return total / kernel
