"""Bits by head: which heads of a layer get more under a fixed mean.

The model is `sum of w·beta^-b`: a bit more divides a head's error by beta. Gains of a head fall
with its bits, so giving every bit to the largest gain left is optimal.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

BETA = 4.6
"""Factor between the errors of neighbouring widths, measured with the encoders of this library."""
_FLOOR = 1e-12


def allocate_units(
    importance: mx.array, budget: mx.array, choices: tuple[int, int, int], unit: int,
    beta: float = BETA,
) -> mx.array:  # fmt: skip
    """Units of `unit` bits above the lowest of three widths, for many layers at once.

    Args:
        importance: (..., H) non-negative weights.
        budget: (...) units in all; broadcasts.
        choices: widths, ascending.
        unit: bits of a unit, which divides their differences.
        beta: factor between the errors of neighbouring widths.

    Returns:
        (..., H) uint32 whose sum is the budget if the two steps are equally long, else at most it.
        Equal heads are served from the front.
    """
    low, middle, high = choices
    *lead, heads = importance.shape
    weight = mx.maximum(importance.astype(mx.float32), _FLOOR)
    worth, cost = [], []
    for below, above in ((low, middle), (middle, high)):
        units = (above - below) // unit
        worth.append(weight * ((beta ** (low - below) - beta ** (low - above)) / units))
        cost.append(mx.full(weight.shape, units, dtype=mx.int32))
    order = mx.argsort(-mx.concatenate(worth, axis=-1), axis=-1)
    paid = mx.take_along_axis(mx.concatenate(cost, axis=-1), order, axis=-1)
    taken = mx.where(mx.cumsum(paid, axis=-1) <= budget[..., None], paid, 0)
    back = mx.put_along_axis(mx.zeros_like(taken), order, taken, axis=-1)
    return back.reshape(*lead, 2, heads).sum(axis=-2).astype(mx.uint32)


def allocate_head_bits(
    head_importance: Sequence[float] | Any,
    target_avg_bits: float,
    allowed_bits: Sequence[int],
    n_heads: int,
    warn_degenerate: bool = True,
) -> list[int]:
    """Bits of each head of one layer, by the order of their importances alone.

    A head gets its weight from its rank, so one extreme value does not take every bit; equally
    important heads get equal bits, which may leave a part of the budget.

    Args:
        head_importance: `n_heads` finite numbers.
        target_avg_bits: mean of the result, reached as nearly as whole bits and ties allow.
        allowed_bits: widths to choose from.
        n_heads: number of heads.
        warn_degenerate: warn when the target leaves no choice.

    Returns:
        Bits in the order of the heads; all equal importances give the widest uniform width that
        the target allows.

    Raises:
        ValueError: for another number of heads, values that are not finite, or a target outside
            the allowed widths.
    """
    importance = np.asarray(head_importance, dtype=np.float64).reshape(-1)
    widths = sorted(set(allowed_bits))
    if importance.size != n_heads or not n_heads:
        raise ValueError(f"{importance.size} importances for {n_heads} heads; give one a head")
    if not np.isfinite(importance).all():
        raise ValueError("head_importance must be finite")
    if not widths or not widths[0] <= target_avg_bits <= widths[-1]:
        raise ValueError(f"target_avg_bits={target_avg_bits} must lie within allowed_bits={widths}")
    if warn_degenerate and target_avg_bits in (widths[0], widths[-1]):
        warnings.warn(
            f"target_avg_bits={target_avg_bits} is an end of allowed_bits={widths}: every head "
            f"gets it; choose a target between them",
            UserWarning,
            stacklevel=2,
        )
    _, rank = np.unique(importance, return_inverse=True)
    classes = [np.flatnonzero(rank == r) for r in range(int(rank.max()) + 1)]
    level = np.zeros(n_heads, dtype=int)
    left = round(target_avg_bits * n_heads) - widths[0] * n_heads
    # From the best class down, class by class: all of it or none, so that equal heads stay equal.
    spread = np.linspace(-1.0, 1.0, len(classes)) if len(classes) > 1 else np.zeros(1)
    weight = BETA**spread
    while True:
        best, gain = None, 0.0
        for i, heads in enumerate(classes):
            at = level[heads[0]]
            if at + 1 == len(widths):
                continue
            step = widths[at + 1] - widths[at]
            value = weight[i] * (BETA ** -float(widths[at]) - BETA ** -float(widths[at + 1])) / step
            if step * heads.size <= left and value > gain * (1 + 1e-12):
                best, gain = i, value
        if best is None:
            return [widths[at] for at in level]
        heads = classes[best]
        left -= (widths[level[heads[0]] + 1] - widths[level[heads[0]]]) * heads.size
        level[heads] += 1
