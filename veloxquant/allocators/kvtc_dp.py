"""Bits for components of given variance by dynamic programming: exact for any set of widths.

Minimises `Σ variance·β^-bits` under a cap on the sum. Widths may have gaps, which rules greedy
methods out. All sequences of one call share the sweep over components.
Source: KVTC (arXiv 2511.01815); reverse water-filling (Cover and Thomas, chapter 10).
"""

from collections.abc import Sequence

import numpy as np

BIT_CHOICES = (0, 1, 2, 3, 4, 6, 8)


def dp_allocate_bits(
    variances: np.ndarray,
    total_bit_budget: int,
    bit_choices: Sequence[int] = BIT_CHOICES,
    beta: float = 3.5,
) -> np.ndarray:
    """Bits of each component that minimise the summed distortion within a budget.

    Args:
        variances: (..., n), at least 0, any order and scale; leading axes are problems of their
            own.
        total_bit_budget: most bits that the n components of one problem may take together.
        bit_choices: allowed widths, increasing.
        beta: factor by which one bit divides the distortion.

    Returns:
        (..., n) int64. Bits never rise as variances fall; equal variances differ by one step at
        most, lower index first.

    Raises:
        ValueError: for negative or non-finite variances, widths that do not increase, beta of 1 or
            less, or a budget that the smallest width exceeds.
    """
    return _allocate(variances, total_bit_budget, bit_choices, beta, exact=False)


def allocate_exactly(
    weights: np.ndarray, total: int, bit_choices: Sequence[int], beta: float
) -> np.ndarray:
    """As `dp_allocate_bits`, with bits that sum to `total`, or to the nearest sum below it.

    The budget is spent even where it gains nothing, which keeps a promised average.
    """
    return _allocate(weights, total, bit_choices, beta, exact=True)


def expected_distortion(variances: np.ndarray, bits: np.ndarray, beta: float = 3.5) -> float:
    """`Σ variance·β^-bits`, the quantity that the allocation minimises."""
    return float((np.asarray(variances, np.float64) * float(beta) ** -np.asarray(bits)).sum())


def _checked(
    variances: np.ndarray, budget: int, choices: Sequence[int], beta: float
) -> tuple[np.ndarray, np.ndarray]:
    values = np.asarray(variances, dtype=np.float64)
    widths = np.asarray(choices, dtype=np.int64)
    if values.ndim == 0 or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("variances must be finite numbers of at least 0")
    if widths.ndim != 1 or len(widths) == 0 or widths[0] < 0 or (np.diff(widths) <= 0).any():
        raise ValueError(f"bit_choices={tuple(choices)!r} must be increasing and at least 0")
    if not beta > 1:
        raise ValueError(f"beta={beta!r} must be above 1")
    least = values.shape[-1] * int(widths[0])
    if budget < least:
        raise ValueError(
            f"total_bit_budget={budget} is less than {least}, which {values.shape[-1]} components "
            f"of {widths[0]} bits take; raise it or allow fewer bits"
        )
    return values, widths


def _allocate(
    variances: np.ndarray, budget: int, choices: Sequence[int], beta: float, *, exact: bool
) -> np.ndarray:
    values, widths = _checked(variances, budget, choices, beta)
    *lead, n = values.shape
    rows = values.reshape(-1, n)
    order = np.argsort(-rows, axis=1, kind="stable")
    ranked = np.take_along_axis(rows, order, axis=1)
    # Bits must not depend on the unit of the variances.
    ranked = ranked / np.maximum(ranked[:, :1], np.finfo(np.float64).tiny)
    size = min(int(budget), n * int(widths[-1]))
    chosen = _sweep(ranked, widths, float(beta) ** -widths.astype(np.float64), size, exact=exact)
    # Sums rounded in another order may swap equal components; more bits go to more variance.
    chosen = -np.sort(-chosen, axis=1)
    bits = np.empty_like(chosen)
    np.put_along_axis(bits, order, chosen, axis=1)
    return bits.reshape(*lead, n)


def _sweep(
    ranked: np.ndarray, widths: np.ndarray, factors: np.ndarray, size: int, *, exact: bool
) -> np.ndarray:
    """Best bits (m, n) of ranked variances (m, n); `best[:, w]` is the cost of w bits so far."""
    m, n = ranked.shape
    best = np.full((m, size + 1), np.inf)
    best[:, 0] = 0.0
    picks = np.zeros((n, m, size + 1), dtype=np.uint8)
    for i in range(n):
        fresh = np.full((m, size + 1), np.inf)
        for k, (width, factor) in enumerate(zip(widths.tolist(), factors, strict=True)):
            if width > size:
                break
            cost = best[:, : size + 1 - width] + ranked[:, i : i + 1] * factor
            room = fresh[:, width:]
            better = cost < room
            np.copyto(room, cost, where=better)
            picks[i][:, width:][better] = k
        best = fresh
    if exact:
        spent = size - np.argmax(np.isfinite(best[:, ::-1]), axis=1)
    else:
        spent = np.argmin(best, axis=1)
    chosen = np.empty((m, n), dtype=np.int64)
    each = np.arange(m)
    for i in range(n - 1, -1, -1):
        chosen[:, i] = widths[picks[i][each, spent]]
        spent = spent - chosen[:, i]
    return chosen
