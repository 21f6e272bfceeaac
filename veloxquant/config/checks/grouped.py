"""Ranges of the methods that quantise groups of neighbours."""

from collections.abc import Callable
from itertools import pairwise

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    bits,
    flag,
    idle,
    integer,
    one_of,
    real,
    refuse,
    sinks,
)


def check_kivi(config: KVCacheConfig) -> None:
    """Affine bits, an MLX group size, a residual of whole groups."""
    bits(config, AFFINE_BITS)
    _whole_groups(config, "kivi_group_size")


def _whole_groups(config: KVCacheConfig, group: str) -> None:
    """An MLX group size, and a residual that is a multiple of it."""
    one_of(config, group, AFFINE_GROUPS)
    residual, size = integer(config, "residual_length", 1), getattr(config, group)
    if residual % size:
        raise refuse("residual_length", residual, f"a multiple of {group}={size}")


def check_kivi_sink(config: KVCacheConfig) -> None:
    """As kivi, with a number of sink tokens."""
    check_kivi(config)
    sinks(config, "n_sink_tokens")


def check_kitty(config: KVCacheConfig) -> None:
    """A share of boosted channels, two widths, and the window of kivi."""
    real(config, "kitty_hi_fraction", 0.0, 1.0)
    one_of(config, "kitty_hi_bit", (3, 4, 8))
    one_of(config, "kitty_lo_bit", (2, 4))
    if config.kitty_hi_bit <= config.kitty_lo_bit:
        raise refuse(
            "kitty_hi_bit", config.kitty_hi_bit, f"above kitty_lo_bit={config.kitty_lo_bit}"
        )
    _whole_groups(config, "kitty_group_size")
    bits(config, AFFINE_BITS)


def check_kvquant(config: KVCacheConfig) -> None:
    """Few bits, a small share of outliers, a value group, sweeps, blocks and sinks."""
    one_of(config, "kvquant_bits", (2, 3, 4))
    real(config, "kvquant_outlier_fraction", 0.0, 0.1)
    one_of(config, "kvquant_group_size", AFFINE_GROUPS)
    for field in ("kvquant_lloyd_iters", "kvquant_refit_interval"):
        integer(config, field, 0)
    sinks(config, "kvquant_n_sink")
    bits(config, AFFINE_BITS)


def check_adakv(config: KVCacheConfig) -> None:
    """Three ascending widths, a mean between them, blocks and what ranks heads."""
    fields = ("adakv_lo_bit", "adakv_mid_bit", "adakv_hi_bit")
    for field in fields:
        one_of(config, field, AFFINE_BITS)
    for below, above in pairwise(fields):
        if getattr(config, above) <= getattr(config, below):
            raise refuse(above, getattr(config, above), f"above {below}={getattr(config, below)}")
    real(config, "adakv_target_avg_bits", config.adakv_lo_bit, config.adakv_hi_bit)
    one_of(config, "adakv_group_size", AFFINE_GROUPS)
    integer(config, "adakv_update_interval", 1)
    one_of(config, "adakv_importance", ("norm_variance", "attention_entropy"))
    integer(config, "adakv_obs_window", 1)
    if config.adakv_importance != "attention_entropy":
        idle(config, "adakv_obs_window", "adakv_importance='attention_entropy'")
    bits(config, AFFINE_BITS)


def check_skvq(config: KVCacheConfig) -> None:
    """Widths of keys and values, a group, exact tokens on both ends, a clip factor."""
    for field in ("skvq_bits_key", "skvq_bits_value"):
        one_of(config, field, (1, 2, 3, 4, 8))
    one_of(config, "skvq_group_size", AFFINE_GROUPS)
    window, n_sink = integer(config, "skvq_window", 0), sinks(config, "skvq_n_sink")
    flag(config, "skvq_reorder")
    flag(config, "skvq_clip_search")
    real(config, "skvq_clip_alpha", 0.3, 1.0, open_low=True)
    if config.skvq_max_ctx is not None:
        integer(config, "skvq_max_ctx", window + n_sink + 1)
    bits(config, AFFINE_BITS)


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    "adakv": check_adakv,
    "kivi": check_kivi,
    "kivi_sink": check_kivi_sink,
    "kitty": check_kitty,
    "kvquant": check_kvquant,
    "skvq": check_skvq,
}
