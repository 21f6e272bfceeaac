"""Scores of NestedKV: how unusual a key is in its context, its block, and the recent stream.

Source: Chen et al., NestedKV, 2026, arXiv 2605.26678. All functions take any leading axes, so that
those of one head and those of many (`..._batched`) are the same. Anomalies are min-max normalised
as the paper's text says (its figure says z-scores).
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.documented import name_at_home

PRIOR = (0.4, 0.4, 0.2)
"""Weights of stable, episodic and current anomaly before heads adapt them."""
_FLOOR = 1e-6
_CONSTANT = 1e-5
"""Cosines within this range are equal but for rounding."""


def block_size_for(n: int) -> int:
    """Tokens of an episode in a context of `n`."""
    return min(max(n // 32, 128), 256)


def unit_keys(keys: mx.array) -> mx.array:
    """Directions (..., n, D) in fp32; zero stays zero."""
    rows = keys.astype(mx.float32)
    return rows / mx.maximum(mx.linalg.norm(rows, axis=-1, keepdims=True), _FLOOR)


def spread(x: mx.array) -> mx.array:
    """(..., n) moved to [0, 1]; zeros where all are equal."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    wide = high - low > _CONSTANT
    return mx.where(wide, (x - low) / mx.where(wide, high - low, 1.0), 0.0)


def anomaly(k_hat: mx.array, anchors: mx.array) -> mx.array:
    """Minus the cosine of keys to anchors that broadcast to them, (..., n)."""
    length = mx.maximum(mx.linalg.norm(anchors, axis=-1), _FLOOR)
    return -(k_hat * anchors).sum(axis=-1) / length


def block_means(k_hat: mx.array, block_size: int) -> mx.array:
    """Mean of the block that each row is in, (..., n, D); the last block may be short."""
    *lead, n, dim = k_hat.shape
    count = -(-n // block_size)
    padded = mx.pad(k_hat, [(0, 0)] * len(lead) + [(0, count * block_size - n), (0, 0)])
    sums = padded.reshape(*lead, count, block_size, dim).sum(axis=-2)
    sizes = mx.minimum(block_size, n - block_size * mx.arange(count))
    return mx.repeat(sums / sizes[:, None], block_size, axis=-2)[..., :n, :]


def recent_means(k_hat: mx.array, window: int) -> mx.array:
    """Mean of each row and the up to `window` - 1 rows before it, (..., n, D)."""
    n = k_hat.shape[-2]
    sums = mx.cumsum(k_hat, axis=-2)
    if n > window:
        later = sums[..., window:, :] - sums[..., :-window, :]
        sums = mx.concatenate([sums[..., :window, :], later], axis=-2)
    return sums / mx.minimum(window, mx.arange(1, n + 1))[:, None]


def per_scale_anomaly_scores(
    k_hat: mx.array, block_size: int, window: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Stable, episodic and current anomaly of unit keys (..., n, D): three (..., n) in [0, 1]."""
    stable = anomaly(k_hat, k_hat.mean(axis=-2, keepdims=True))
    episodic = anomaly(k_hat, block_means(k_hat, block_size))
    current = anomaly(k_hat, recent_means(k_hat, window))
    return spread(stable), spread(episodic), spread(current)


def blend_weights(
    scales: Sequence[mx.array], beta: float, prior: tuple[float, float, float] = PRIOR
) -> mx.array:
    """(..., 3) weights, larger for scales that part tokens well: top tenth minus bottom tenth."""
    tenth = max(1, scales[0].shape[-1] // 10)
    ordered = [mx.sort(a, axis=-1) for a in scales]
    gaps = [a[..., -tenth:].mean(axis=-1) - a[..., :tenth].mean(axis=-1) for a in ordered]
    logits = mx.log(mx.array(prior, dtype=mx.float32)) + beta * mx.stack(gaps, axis=-1)
    return mx.softmax(logits, axis=-1)


def head_adaptive_blend(
    a_s_hat: mx.array,
    a_e_hat: mx.array,
    a_c_hat: mx.array,
    beta: float = 3.0,
    prior: tuple[float, float, float] = PRIOR,
) -> mx.array:
    """The three anomalies (..., n) in one, weighted by head."""
    weights = blend_weights((a_s_hat, a_e_hat, a_c_hat), beta, prior)
    return (mx.stack([a_s_hat, a_e_hat, a_c_hat], axis=-1) * weights[..., None, :]).sum(axis=-1)


def surprise_gate(
    a_s_hat: mx.array, a_e_hat: mx.array, a_c_hat: mx.array, tau: float, kappa: float
) -> mx.array:
    """How far the strongest scale is trusted, (..., n) in (0, 1): much where the three disagree."""
    surprise = spread(mx.stack([a_s_hat, a_e_hat, a_c_hat], axis=-1).var(axis=-1) ** 0.5)
    surprise = mx.maximum(surprise - surprise.mean(axis=-1, keepdims=True), 0.0)
    return mx.sigmoid(kappa * (surprise - tau))


def surprise_gated_score(
    a_s_hat: mx.array,
    a_e_hat: mx.array,
    a_c_hat: mx.array,
    a_blend: mx.array,
    tau: float = 0.6,
    kappa: float = 10.0,
) -> mx.array:
    """The blend (..., n), raised to the strongest scale where the three disagree."""
    gate = surprise_gate(a_s_hat, a_e_hat, a_c_hat, tau, kappa)
    strongest = mx.maximum(mx.maximum(a_s_hat, a_e_hat), a_c_hat)
    return (1.0 - gate) * a_blend + gate * strongest


def nestedkv_score(
    keys: mx.array,
    window: int = 64,
    beta: float = 3.0,
    tau: float = 0.6,
    kappa: float = 10.0,
    prior: tuple[float, float, float] = PRIOR,
) -> mx.array:
    """Scores (..., n) of keys (..., n, D); larger is better."""
    scales = per_scale_anomaly_scores(unit_keys(keys), block_size_for(keys.shape[-2]), window)
    return surprise_gated_score(*scales, head_adaptive_blend(*scales, beta, prior), tau, kappa)


per_scale_anomaly_scores_batched = per_scale_anomaly_scores
head_adaptive_blend_batched = head_adaptive_blend
surprise_gated_score_batched = surprise_gated_score
nestedkv_score_batched = nestedkv_score


def nestedkv_allocate_head_budgets(
    head_scores: Sequence[mx.array], total_budget: int, safeguard_alpha: float = 0.2
) -> list[int]:
    """Rows of each head: its safeguard, then the best scores of all heads.

    Args:
        head_scores: one (n_h,) list a head.
        total_budget: rows of all heads.
        safeguard_alpha: part of an even share that every head has in any case.

    Returns:
        One number a head; their sum is `total_budget`, or all rows if there are fewer.
    """
    sizes = [len(scores) for scores in head_scores]
    least = int(safeguard_alpha * (total_budget // max(1, len(sizes))))
    out = [min(least, size) for size in sizes]
    ordered = [np.sort(np.array(scores, dtype=np.float32))[::-1] for scores in head_scores]
    rest = [scores[n:] for scores, n in zip(ordered, out, strict=True)]
    heads = np.repeat(np.arange(len(sizes)), [len(scores) for scores in rest])
    order = np.argsort(-np.concatenate(rest), kind="stable")
    for head in heads[order[: max(0, total_budget - sum(out))]]:
        out[head] += 1
    return out


def __getattr__(name: str) -> Any:
    """Documented names of this module that live elsewhere: functions on rows of single heads."""
    return name_at_home(__name__, name)
