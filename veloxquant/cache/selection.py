"""Which rows survive: forced rows, then the best scores; ties by a fixed rule."""

import mlx.core as mx


def select_rows(
    scores: mx.array, budget: int, n_sink: int, n_recent: int, *, later_wins: bool = False
) -> mx.array:
    """Indices of the rows to keep, ascending.

    Args:
        scores: (B, H, n) fp32, larger is better; NaN counts as worst.
        budget: rows to keep, at most n; at least `n_sink` + `n_recent`.
        n_sink: first rows, always kept.
        n_recent: last rows, always kept.
        later_wins: keep the later of equal scores instead of the earlier one.

    Returns:
        (B, H, budget) int32.
    """
    batch, heads, n = scores.shape
    lead = (batch, heads)
    if budget >= n:
        return mx.broadcast_to(mx.arange(n, dtype=mx.int32), (*lead, n))
    middle = scores[..., n_sink : n - n_recent]
    middle = mx.where(mx.isnan(middle), -mx.inf, middle)
    if budget == n - 1:
        return _all_but_worst(middle, n, n_sink, later_wins=later_wins)
    free, width = budget - n_sink - n_recent, middle.shape[-1]
    # A stable ascending sort of the negated scores keeps the first among equals.
    order = mx.argsort(-(middle[..., ::-1] if later_wins else middle), axis=-1)[..., :free]
    order = width - 1 - order.astype(mx.int32) if later_wins else order.astype(mx.int32)
    first = mx.broadcast_to(mx.arange(n_sink, dtype=mx.int32), (*lead, n_sink))
    last = mx.broadcast_to(mx.arange(n - n_recent, n, dtype=mx.int32), (*lead, n_recent))
    return mx.concatenate([first, mx.sort(order + n_sink, axis=-1), last], axis=-1)


def _all_but_worst(middle: mx.array, n: int, n_sink: int, *, later_wins: bool) -> mx.array:
    """The one eviction of a decoding step, without sorting."""
    if later_wins:
        worst = mx.argmin(middle, axis=-1, keepdims=True)
    else:
        worst = middle.shape[-1] - 1 - mx.argmin(middle[..., ::-1], axis=-1, keepdims=True)
    places = mx.arange(n - 1, dtype=mx.int32)
    return places + (places >= worst.astype(mx.int32) + n_sink).astype(mx.int32)


def left_out(keep: mx.array, n: int) -> mx.array:
    """Indices of `n` rows that are not in `keep` (B, H, m) ascending: (B, H, n - m) int32."""
    batch, heads, kept = keep.shape
    marks = mx.zeros((batch, heads, n), dtype=mx.int32)
    marks = mx.put_along_axis(marks, keep, mx.array(1, dtype=mx.int32), axis=-1)
    # Unmarked rows first, in order: the sort is stable.
    return mx.argsort(marks, axis=-1)[..., : n - kept].astype(mx.int32)


def pick_rows(x: mx.array, index: mx.array) -> mx.array:
    """Rows (B, H, n, ...) at (B, H, m), each head its own: whole rows are copied at once.

    `mx.take_along_axis` looks every element up by itself, which takes 16 times as long here.
    """
    batch, heads, n, *rest = x.shape
    first = mx.arange(batch * heads, dtype=mx.int32).reshape(batch, heads, 1) * n
    flat = (index.astype(mx.int32) + first).reshape(-1)
    rows = mx.take(x.reshape(batch * heads * n, *rest), flat, axis=0)
    return rows.reshape(batch, heads, index.shape[-1], *rest)


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


def max_pool(x: mx.array, kernel: int) -> mx.array:
    """Maximum over `kernel` neighbours along the last axis."""
    half = kernel // 2
    n = x.shape[-1]
    padded = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)], constant_values=-mx.inf)
    best = padded[..., :n]
    for shift in range(1, kernel):
        best = mx.maximum(best, padded[..., shift : shift + n])
    return best
