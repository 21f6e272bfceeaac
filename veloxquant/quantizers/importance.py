"""How much a head's errors matter, from its keys alone: running sums by block.

Variance of the keys' norms over the squared mean norm, or how widely the newest keys of a block,
taken as queries, attend within it. The latter is a proxy: caches do not see queries when they code.
"""

import mlx.core as mx

SINKS = 4
"""First tokens of a sequence that statistics leave out: models give them odd norms."""
NORM_VARIANCE, ATTENTION_ENTROPY = "norm_variance", "attention_entropy"
_TINY = 1e-30


def head_entropy(keys: mx.array, window: int) -> mx.array:
    """Mean entropy of causal attention of the newest `window` keys as queries, over its largest.

    Args:
        keys: (..., n, D) fp32.
        window: queries, at most n of them.

    Returns:
        (...) within [0, 1].
    """
    n, dim = keys.shape[-2:]
    first = max(0, n - window)
    scores = keys[..., first:, :] @ keys.swapaxes(-1, -2) * dim**-0.5
    visible = mx.arange(n) <= mx.arange(first, n)[:, None]
    weights = mx.softmax(mx.where(visible, scores, -mx.inf), axis=-1)
    entropy = -(weights * mx.log(mx.maximum(weights, _TINY))).sum(axis=-1)
    most = mx.log(mx.maximum(mx.arange(first, n) + 1, 2).astype(mx.float32))
    return (entropy / most).mean(axis=-1)


def block_sums(x: mx.array, group: int, importance: str, window: int, first: int) -> mx.array:
    """What each block of (B, H, n, D) fp32 adds to the sums: (B, H, blocks, 2).

    `first` is the number of the first block.
    """
    batch, heads, n, dim = x.shape
    blocks = x.reshape(batch, heads, n // group, group, dim)
    if importance == ATTENTION_ENTROPY:
        entropy = head_entropy(blocks, window)
        return mx.stack([entropy, mx.zeros_like(entropy)], axis=-1)
    norms = mx.linalg.norm(blocks, axis=-1)
    if first == 0:
        counted = mx.arange(n).reshape(n // group, group) >= SINKS
        norms = mx.where(counted, norms, 0.0)
    return mx.stack([norms.sum(axis=-1), mx.square(norms).sum(axis=-1)], axis=-1)


def importance_of(sums: mx.array, blocks: mx.array, group: int, importance: str) -> mx.array:
    """Importance of heads (B, H, n) from sums (B, H, n, 2) over so many `blocks` (n,) each."""
    if importance == ATTENTION_ENTROPY:
        return sums[..., 0] / blocks
    count = blocks * group - SINKS
    mean, square = sums[..., 0] / count, sums[..., 1] / count
    variance = mx.maximum(square - mx.square(mean), 0.0) / mx.maximum(mx.square(mean), _TINY)
    return mx.where(mx.isfinite(variance), variance, 0.0)
