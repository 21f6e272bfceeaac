"""Low-rank latents of groups of heads, as documented functions on plain arrays.

Source: Palu (arXiv 2407.21118).
"""

from math import ceil

import mlx.core as mx

from veloxquant.quantizers.latent_functions import basis_of, on_grid, project_rows, rows_of
from veloxquant.quantizers.specs.latent import even_bounds


def head_group_bounds(n_heads: int, n_groups: int) -> list[tuple[int, int]]:
    """Ranges of heads: `n_groups` within [1, n_heads], the first ones one head longer."""
    return list(even_bounds(n_heads, n_groups))


def group_head_svd(
    x_group: mx.array, rank: int | None = None, energy_threshold: float = 0.9
) -> tuple[mx.array, mx.array, mx.array]:
    """Directions (D, r) fp32, mean (D,) and singular values of heads (G, S, D), all rows as one."""
    return basis_of(x_group.reshape(-1, x_group.shape[-1]), rank, energy_threshold)


def project_to_latent(x: mx.array, V: mx.array, mu: mx.array) -> mx.array:
    """Latents (S, r) of rows (S, D)."""
    return project_rows(x, V, mu)


def reconstruct_from_latent(L: mx.array, V: mx.array, mu: mx.array) -> mx.array:
    """Rows (S, D) fp16 of latents (S, r)."""
    return rows_of(L, V, mu)


def quantize_latent(
    L: mx.array,
    singular_values: mx.array,
    hi_bit: int,
    lo_bit: int,
    hi_fraction: float,
    group_size: int,
) -> mx.array:
    """Latents (S, r), the share `hi_fraction` of the strongest at `hi_bit`, fp16.

    Every token has its scales, for each `group_size` latents of one width.
    """
    order = mx.argsort(-singular_values, axis=-1)
    back = mx.argsort(order, axis=-1)
    wide = mx.broadcast_to(order[..., None, :], L.shape)
    sorted_ = mx.take_along_axis(L, wide, axis=-1)
    cut = min(L.shape[-1], ceil(hi_fraction * L.shape[-1]))
    parts = [
        on_grid(part, bits, group_size)
        for part, bits in ((sorted_[..., :cut], hi_bit), (sorted_[..., cut:], lo_bit))
        if part.shape[-1]
    ]
    rounded = mx.concatenate([p.astype(mx.float32) for p in parts], axis=-1)
    wide = mx.broadcast_to(back[..., None, :], L.shape)
    return mx.take_along_axis(rounded, wide, axis=-1).astype(mx.float16)


def project_to_latent_batched(x: mx.array, V: mx.array, mu: mx.array) -> mx.array:
    """Latents (G, S, r) of rows (G, S, D), each group in its basis."""
    return project_rows(x, V, mu)


def reconstruct_from_latent_batched(
    L: mx.array, V: mx.array, mu: mx.array, out_dtype: mx.Dtype = mx.float16
) -> mx.array:
    """Rows (G, S, D) of latents (G, S, r)."""
    return rows_of(L, V, mu, out_dtype)


def quantize_latent_batched(
    L: mx.array,
    singular_values: mx.array,
    hi_bit: int,
    lo_bit: int,
    hi_fraction: float,
    group_size: int,
) -> mx.array:
    """As `quantize_latent` for latents (G, S, r) with singular values (G, r)."""
    return quantize_latent(L, singular_values, hi_bit, lo_bit, hi_fraction, group_size)
