"""Ranges of the methods that keep latents, or share them among layers."""

from collections.abc import Callable
from typing import Any

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    bits,
    flag,
    integer,
    one_of,
    real,
    refuse,
)

MAX_DIM = 1024
MAX_ROW = 1 << 20
LATENT_BITS = (2, 3, 4, 5, 6, 8, 16)


def _share(config: KVCacheConfig, field: str) -> None:
    real(config, field, 0, 1, open_low=True)


def _rank(config: KVCacheConfig, field: str, most: int) -> None:
    if getattr(config, field) is not None:
        integer(config, field, 1, most)


def check_svdq(config: KVCacheConfig) -> None:
    """A rank or a share of energy, an MLX group size, widths of which one is above none."""
    bits(config, AFFINE_BITS)
    _rank(config, "svdq_rank", MAX_DIM)
    _share(config, "svdq_energy_threshold")
    schedule: Any = config.svdq_bit_schedule
    legal = (0, *AFFINE_BITS)
    listed = isinstance(schedule, tuple | list) and all(
        isinstance(n, int) and not isinstance(n, bool) and n in legal for n in schedule
    )
    if not listed or not schedule or not schedule[0]:
        raise refuse(
            "svdq_bit_schedule", schedule,
            f"a list of widths out of {', '.join(map(str, legal))}, the first one above 0",
        )  # fmt: skip
    one_of(config, "svdq_group_size", AFFINE_GROUPS)


def check_palu(config: KVCacheConfig) -> None:
    """A rank or a share of energy, at least one group of heads, two widths, an MLX group size."""
    bits(config, AFFINE_BITS)
    _rank(config, "palu_rank", MAX_ROW)
    _share(config, "palu_energy_threshold")
    integer(config, "palu_n_head_groups", 1)
    for field in ("palu_hi_bit", "palu_lo_bit"):
        one_of(config, field, LATENT_BITS)
    real(config, "palu_hi_fraction", 0, 1)
    one_of(config, "palu_group_size", AFFINE_GROUPS)
    flag(config, "palu_quantize_values")


def check_xquant(config: KVCacheConfig) -> None:
    """Layers a group, widths of codes and residuals, an MLX group size."""
    bits(config, AFFINE_BITS)
    integer(config, "xquant_group_size", 1)
    one_of(config, "xquant_base_bits", (1, 2, 3, 4, 8))
    one_of(config, "xquant_residual_bits", (0, *AFFINE_BITS))
    one_of(config, "xquant_group_quant_size", AFFINE_GROUPS)
    integer(config, "xquant_max_ctx", config.xquant_group_quant_size)


def check_minicache(config: KVCacheConfig) -> None:
    """Pairs of layers, a cosine, a place on the arc between both."""
    bits(config, AFFINE_BITS)
    real(config, "minicache_start_frac", 0, 1)
    one_of(config, "minicache_group_size", (2,))
    real(config, "minicache_retention_threshold", -1, 1)
    real(config, "minicache_slerp_t", 0, 1)
    integer(config, "minicache_max_ctx", 1)


def check_xkv(config: KVCacheConfig) -> None:
    """Layers a group, a rank or a share of energy, a width, an MLX group size."""
    bits(config, AFFINE_BITS)
    integer(config, "xkv_group_size", 1)
    _rank(config, "xkv_rank", MAX_ROW)
    _share(config, "xkv_energy_threshold")
    one_of(config, "xkv_latent_bits", LATENT_BITS)
    one_of(config, "xkv_group_quant_size", AFFINE_GROUPS)
    integer(config, "xkv_max_ctx", 1)


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    "svdq": check_svdq,
    "palu": check_palu,
    "xquant": check_xquant,
    "minicache": check_minicache,
    "xkv": check_xkv,
}
