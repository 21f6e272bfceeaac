"""Latents of keys at mixed bits, as documented functions on plain arrays.

Source: SVDq (arXiv 2502.15304).
"""

from collections.abc import Sequence

import mlx.core as mx

from veloxquant.quantizers.latent_functions import basis_of, by_schedule, project_rows, rows_of
from veloxquant.quantizers.specs.latent import even_bounds

DEFAULT_BIT_SCHEDULE = (8, 4, 2, 1, 1, 0, 0, 0)
"""Bits of each group of latents, the strongest first; 0 drops the group."""
MIN_SAFE_CHANNELS_PER_GROUP = 4
"""Fewest latents of a group with which the schedule means what it says."""


def svd_compress_keys(
    keys: mx.array, rank: int | None = None, energy_threshold: float = 0.95
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Latents (S, r), directions (D, r), mean (D,) and singular values (r,) of keys (S, D)."""
    basis, mean, s = basis_of(keys, rank, energy_threshold)
    return project_rows(keys, basis, mean), basis, mean, s


def svd_compress_keys_batched(
    keys: mx.array, rank: int | None = None, energy_threshold: float = 0.95
) -> tuple[list[mx.array], list[mx.array], list[mx.array], list[mx.array]]:
    """As `svd_compress_keys` for every head of keys (H, S, D); a list of each result."""
    each = [svd_compress_keys(head, rank, energy_threshold) for head in keys]
    latents, bases, means, values = zip(*each, strict=True)
    return list(latents), list(bases), list(means), list(values)


def quantize_latents_mixed(
    L: mx.array,
    singular_values: mx.array,
    bit_schedule: Sequence[int] = DEFAULT_BIT_SCHEDULE,
    group_size: int = 32,
) -> mx.array:
    """Latents (S, r) rounded at the bits of their group, fp16.

    Latents count as ordered by `singular_values`, falling.
    """
    order = mx.argsort(-singular_values)
    rounded = by_schedule(mx.take(L, order, axis=-1), bit_schedule, group_size)
    return mx.take(rounded, mx.argsort(order), axis=-1).astype(mx.float16)


def reconstruct_keys(L_q: mx.array, V: mx.array, K_mean: mx.array) -> mx.array:
    """Keys (S, D) fp16 of latents (S, r)."""
    return rows_of(L_q, V, K_mean)


def project_quantize_reconstruct_batched(
    keys: mx.array,
    V_list: list[mx.array],
    K_mean_list: list[mx.array],
    schedules: list[Sequence[int]],
    group_size: int,
) -> mx.array:
    """Keys (H, S, D) through the basis and the schedule of each head, fp16."""
    heads = [
        rows_of(by_schedule(project_rows(x, basis, mean), schedule, group_size), basis, mean)
        for x, basis, mean, schedule in zip(keys, V_list, K_mean_list, schedules, strict=True)
    ]
    return mx.stack(heads)


def latent_group_slices(r: int, n_groups: int = 8) -> list[tuple[int, int]]:
    """Ranges of min(n_groups, r) groups of latents, the first ones longer."""
    return list(even_bounds(r, n_groups))


def equivalent_bit_width(r: int, bit_schedule: Sequence[int] = DEFAULT_BIT_SCHEDULE) -> float:
    """Mean bits of `r` latents under a schedule."""
    bounds = even_bounds(r, len(bit_schedule))
    total = sum(
        bits * (stop - start) for bits, (start, stop) in zip(bit_schedule, bounds, strict=False)
    )
    return total / r


def min_safe_rank(n_groups: int = 8) -> int:
    """Fewest latents with which every group of a schedule has enough of them."""
    return n_groups * MIN_SAFE_CHANNELS_PER_GROUP
