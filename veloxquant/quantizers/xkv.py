"""A basis that layers share, as documented functions on plain arrays.

These share directions and give every layer latents of its own; the cache shares the latents.
Source: xKV (arXiv 2503.18893).
"""

import mlx.core as mx

from veloxquant.quantizers.latent_functions import basis_of, on_grid, project_rows, rows_of


def pair_layers_grouped(n_layers: int, group_size: int) -> list[tuple[int, int, int]]:
    """Place in its group, number and size of the group for every layer; the last may be short."""
    return [
        (i % group_size, i // group_size, min(group_size, n_layers - i // group_size * group_size))
        for i in range(n_layers)
    ]


def joint_svd_compress(
    key_stack: list[mx.array], rank: int | None = None, energy_threshold: float = 0.95
) -> tuple[mx.array, mx.array, mx.array]:
    """Directions (D, r), mean (D,) and singular values of the rows of all layers, (S, D) each."""
    return basis_of(mx.concatenate(key_stack, axis=0), rank, energy_threshold)


def project_into_shared_basis(keys: mx.array, V_g: mx.array, K_mean_g: mx.array) -> mx.array:
    """Latents (S, r) of keys (S, D)."""
    return project_rows(keys, V_g, K_mean_g)


def reconstruct_from_shared_basis(L_q: mx.array, V_g: mx.array, K_mean_g: mx.array) -> mx.array:
    """Keys (S, D) fp16 of latents (S, r)."""
    return rows_of(L_q, V_g, K_mean_g)


def quantize_latents_uniform(L: mx.array, bits: int = 4, group_size: int = 32) -> mx.array:
    """Latents (S, r) rounded token by token, in groups of `group_size` latents, fp16."""
    return on_grid(L, bits, group_size).astype(mx.float16)


def project_quantize_reconstruct_batched(
    keys: mx.array, V_g: mx.array, K_mean_g: mx.array, bits: int = 4, group_size: int = 32
) -> mx.array:
    """Keys (B, H, S, D) through one basis and back, fp16."""
    latents = on_grid(project_rows(keys, V_g, K_mean_g), bits, group_size)
    return rows_of(latents, V_g, K_mean_g)
