"""Concentration of a layer's keys, and budgets weighted by it."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from veloxquant.allocators.layer_budgets import raised, rounded
from veloxquant.documented import name_at_home


def mean_cosines(keys: mx.array) -> mx.array:
    """Mean cosine of different rows of (..., n, D), in (...) fp32; 0 for fewer than two rows."""
    n = keys.shape[-2]
    if n < 2:
        return mx.zeros(keys.shape[:-2])
    rows = keys.astype(mx.float32)
    lengths = mx.linalg.norm(rows, axis=-1, keepdims=True)
    unit = rows / mx.maximum(lengths, 1e-6)
    total = (unit.sum(axis=-2) ** 2).sum(axis=-1) - (unit**2).sum(axis=(-1, -2))
    return total / (n * (n - 1))


def concentration_score(keys: mx.array) -> float:
    """Mean cosine of different keys (n, D); 0.0 for fewer than two."""
    return mean_cosines(keys).item()  # type: ignore[return-value]


def squeeze_budgets(
    concentrations: Sequence[float], avg_budget: int, n_sink: int, strength: float = 1.0
) -> list[int]:
    """Rows of each layer in proportion to (1 - concentration)^strength.

    Args:
        concentrations: one a layer, clamped to [0, 1].
        avg_budget: mean rows, more than `n_sink`.
        n_sink: first rows; every layer gets more than that.
        strength: from 0, the same for all.

    Raises:
        ValueError: when the mean leaves no room beside the sinks.
    """
    if avg_budget <= n_sink:
        raise ValueError(
            f"avg_budget={avg_budget} leaves no room; it must be more than n_sink = {n_sink}"
        )
    if not concentrations:
        return []
    weights = [(1.0 - min(max(c, 0.0), 1.0)) ** strength for c in concentrations]
    total, count = sum(weights), len(weights)
    if total <= 0:
        return [avg_budget] * count
    shares = [count * avg_budget * w / total for w in weights]
    return rounded(raised(shares, n_sink + 1), count * avg_budget)


def __getattr__(name: str) -> Any:
    """Documented names of this module that live elsewhere: functions on rows of single heads."""
    return name_at_home(__name__, name)
