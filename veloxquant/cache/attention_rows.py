"""Attention of given queries over the rows held, as scores of those rows."""

from collections.abc import Iterator

import mlx.core as mx

QUERY_BLOCK = 256
"""Most query rows that are scored at once."""


def logit_rows(
    queries: mx.array,
    keys: mx.array,
    scale: float,
    first_row: int,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """Scaled products of queries with the rows they may see, -inf elsewhere.

    Args:
        queries: (B, Hq, R, D), at most `QUERY_BLOCK` rows.
        keys: (B, H, n, D).
        scale: the model's factor of the products.
        first_row: row of the first query itself; query i sees the rows up to `first_row` + i.
        dtype: type of the products.

    Returns:
        (B, H, Hq/H, R, n) fp32.
    """
    batch, n_q, count, dim = queries.shape
    heads, n = keys.shape[1], keys.shape[2]
    assert count <= QUERY_BLOCK, f"{count} query rows at once"
    q = (queries.reshape(batch, heads, -1, dim).astype(mx.float32) * scale).astype(dtype)
    products = (q @ keys.astype(dtype).swapaxes(-1, -2)).astype(mx.float32)
    logits = products.reshape(batch, heads, n_q // heads, count, n)
    if first_row >= n - 1:
        return logits
    visible = mx.arange(first_row, first_row + count)[:, None] >= mx.arange(n)[None]
    return mx.where(visible, logits, -mx.inf)


def attention_rows(queries: mx.array, keys: mx.array, scale: float, first_row: int) -> mx.array:
    """Attention weights of queries over the rows they may see, as `logit_rows`."""
    return row_weights(logit_rows(queries, keys, scale, first_row))


def row_weights(logits: mx.array, sinks: mx.array | None = None) -> mx.array:
    """Softmax of logits (B, H, G, R, n), with sinks (H·G,) in its denominator, in fp32."""
    if sinks is None:
        return softmax_beside(logits, None)
    heads, group = logits.shape[1:3]
    return softmax_beside(logits, sinks.reshape(1, heads, group, 1, 1))


def softmax_beside(logits: mx.array, edges: mx.array | None) -> mx.array:
    """Softmax along the last axis, of which `edges`, (..., 1) or None, take their share."""
    if edges is None:
        return mx.softmax(logits, axis=-1, precise=True)
    edges = edges.astype(mx.float32)
    peak = mx.maximum(logits.max(axis=-1, keepdims=True), edges)
    weights = mx.exp(logits - peak)
    return weights / (weights.sum(axis=-1, keepdims=True) + mx.exp(edges - peak))


def query_blocks(queries: mx.array) -> Iterator[tuple[int, mx.array]]:
    """Blocks of at most `QUERY_BLOCK` rows of (B, Hq, L, D), each with its first index."""
    for start in range(0, queries.shape[2], QUERY_BLOCK):
        yield start, queries[:, :, start : start + QUERY_BLOCK]
