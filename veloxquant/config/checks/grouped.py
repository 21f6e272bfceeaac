"""Ranges of the methods that quantise groups of neighbours."""

from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    NO_OUTLIERS,
    bits,
    integer,
    one_of,
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


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    "kivi": check_kivi,
    "kivi_sink": check_kivi_sink,
}
