"""Which tokens matter: scores from keys or from attention, and ranks without chance."""

import mlx.core as mx


def rank(scores: mx.array) -> mx.array:
    """Place of each entry of the last axis, 0 for the largest; of equal ones the older comes first.

    By counting, so that equal scores rank alike however many rows are ranked at once.
    """
    at = mx.arange(scores.shape[-1])
    other, own = scores[..., None, :], scores[..., :, None]
    before = (other > own) | ((other == own) & (at[None] < at[:, None]))
    return before.sum(axis=-1)


def small_norm_saliency(keys: mx.array) -> mx.array:
    """Minus the norm of each key (..., n, D): keys of small norm attract attention.

    Source: Devoto et al., 2024, arXiv 2406.11430; sinks are the extreme case.
    """
    return -mx.linalg.norm(keys.astype(mx.float32), axis=-1)


def attention_saliency(weights: mx.array) -> mx.array:
    """Attention that each token collects, over the queries that could see it.

    Source: ZipCache (arXiv 2405.14256): plain sums favour early tokens, which more queries see.

    Args:
        weights: (..., L, T) softmax rows of the last L of T tokens, causal.

    Returns:
        (..., T).
    """
    length, total = weights.shape[-2:]
    seen = mx.minimum(total - mx.arange(total), length)
    return weights.sum(axis=-2) / mx.maximum(seen, 1)


def cosine_saliency(queries: mx.array, keys: mx.array) -> mx.array:
    """Mean over queries of the cosine with each key, negative ones counted as 0.

    Args:
        queries: (B, Hq, m, D), Hq a multiple of H.
        keys: (B, H, n, D).

    Returns:
        (B, H, n); 0 for keys or queries without length.
    """
    batch, heads, _, dim = keys.shape
    grouped = queries.astype(mx.float32).reshape(batch, heads, -1, dim)
    cosine = unit_rows(keys.astype(mx.float32)) @ unit_rows(grouped).swapaxes(-1, -2)
    return mx.maximum(cosine, 0).mean(axis=-1)


def unit_rows(x: mx.array) -> mx.array:
    """Rows of length 1; rows of zeros stay zeros."""
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-30)
