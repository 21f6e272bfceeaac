"""Greedy water-filling: one bit at a time to the component with the largest remaining error.

Source: reverse water-filling (Shannon 1959; Cover and Thomas, chapter 10), as in SpectralQuant.
"""

import heapq

import numpy as np

_FLOOR = 1e-12


def water_fill_bits(
    eigenvalues: np.ndarray, total_bit_budget: int, min_bits: int = 1, max_bits: int = 8
) -> np.ndarray:
    """Bits of each component, exactly `total_bit_budget` in all.

    Each bit divides a component's error by four, so gains fall and the greedy choice is optimal.

    Args:
        eigenvalues: (n,) variances of at least 0, any order and scale.
        total_bit_budget: bits to give away, between n·min_bits and n·max_bits.
        min_bits: bits that every component gets.
        max_bits: most bits of one component.

    Returns:
        (n,) int64; ties go to the lower index.

    Raises:
        ValueError: for negative or non-finite eigenvalues, or a total out of range.
    """
    values = np.asarray(eigenvalues, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("eigenvalues must be one row of finite numbers of at least 0")
    n = len(values)
    if not 0 <= min_bits <= max_bits or not n * min_bits <= total_bit_budget <= n * max_bits:
        raise ValueError(
            f"total_bit_budget={total_bit_budget} is not possible with {n} components of "
            f"{min_bits} to {max_bits} bits; it must be from {n * min_bits} to {n * max_bits}"
        )
    peak = values.max(initial=0.0)
    # Bits must not depend on the unit; without any variance all components are alike.
    values = np.maximum(values / peak, _FLOOR) if peak > 0 else np.ones(n)
    bits = np.full(n, min_bits, dtype=np.int64)
    heap = [(-value * 4.0**-min_bits, i) for i, value in enumerate(values)]
    heapq.heapify(heap)
    for _ in range(int(total_bit_budget) - n * min_bits):
        error, i = heapq.heappop(heap)
        bits[i] += 1
        if bits[i] < max_bits:
            heapq.heappush(heap, (error / 4, i))
    return bits
