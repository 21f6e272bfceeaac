"""Legal ranges of the configuration, method by method; one file a family, as in the layouts."""

from collections.abc import Callable

from veloxquant.config.checks import (
    base,
    coded,
    eviction,
    eviction_pages,
    eviction_prompt,
    grouped,
    latent,
    rotated,
    tiered,
    vector,
)
from veloxquant.config.kv_cache import KVCacheConfig

CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    name: rule
    for family in (
        base,
        rotated,
        grouped,
        vector,
        tiered,
        coded,
        latent,
        eviction,
        eviction_pages,
        eviction_prompt,
    )
    for name, rule in family.CHECKS.items()
}
