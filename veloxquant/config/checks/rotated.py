"""Ranges of the methods that rotate vectors and code their coordinates."""

from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import CODEBOOK_BITS, NO_OUTLIERS, bits, unused


def check_turboquant_rvq(config: KVCacheConfig) -> None:
    """Total bits 1 to 6; outlier settings belong to the standalone methods."""
    bits(config, CODEBOOK_BITS)
    unused(config, NO_OUTLIERS)


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {"turboquant_rvq": check_turboquant_rvq}
