"""The layouts of the methods: how each turns its configuration into plans, without MLX.

One file a family of methods. `HELD` is what the method table and the planner read; the methods
build their caches from the same functions.
"""

from collections.abc import Callable

from veloxquant.cache.layouts import (
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
from veloxquant.quantizers.sizes import Held, LayerShape

HELD: dict[str, Callable[[KVCacheConfig, LayerShape, int], Held]] = {
    name: size
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
    for name, size in family.HELD.items()
}
