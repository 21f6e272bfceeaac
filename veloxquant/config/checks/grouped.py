"""Ranges of the methods that quantise groups of neighbours."""

from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    NO_OUTLIERS,
    bits,
    flag,
    integer,
    one_of,
    real,
    refuse,
    unused,
)


def check_kivi(config: KVCacheConfig) -> None:
    """Affine bits, an MLX group size, a residual of whole groups."""
    bits(config, AFFINE_BITS)
    one_of(config, "kivi_group_size", AFFINE_GROUPS)
    residual = integer(config, "residual_length", 1)
    if residual % config.kivi_group_size:
        raise refuse(
            "residual_length", residual, f"a multiple of kivi_group_size={config.kivi_group_size}"
        )
    unused(config, NO_OUTLIERS)


def check_kivi_sink(config: KVCacheConfig) -> None:
    """As kivi, with a number of sink tokens."""
    check_kivi(config)
    integer(config, "n_sink_tokens", 0)


def _no_common_width(config: KVCacheConfig) -> None:
    """Methods whose widths are options of their own take no common one."""
    bits(config, AFFINE_BITS)
    unused(config, (*NO_OUTLIERS, "bit_width_inlier"))


def check_skvq(config: KVCacheConfig) -> None:
    """Widths of keys and values, a group, exact tokens on both ends, a clip factor."""
    for field in ("skvq_bits_key", "skvq_bits_value"):
        one_of(config, field, (1, 2, 3, 4, 8))
    one_of(config, "skvq_group_size", AFFINE_GROUPS)
    window, sinks = integer(config, "skvq_window", 0), integer(config, "skvq_n_sink", 0)
    flag(config, "skvq_reorder")
    flag(config, "skvq_clip_search")
    real(config, "skvq_clip_alpha", 0.3, 1.0, open_low=True)
    if config.skvq_max_ctx is not None:
        integer(config, "skvq_max_ctx", window + sinks + 1)
    _no_common_width(config)


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    "kivi": check_kivi,
    "kivi_sink": check_kivi_sink,
    "skvq": check_skvq,
}
