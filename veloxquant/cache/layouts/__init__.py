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
from veloxquant.cache.layouts.base import SizeOf
from veloxquant.cache.plans import LayerPlan
from veloxquant.config.kv_cache import KVCacheConfig

LEAST_TEXT = 512
"""Tokens of the shortest text that methods are calibrated with; fewer say little of a head."""
_FITTED_TO: dict[str, Callable[[KVCacheConfig], LayerPlan]] = {
    "amc": tiered.amc_plan,
    "kvquant": grouped.kvquant_plan,
    "kvtc": coded.kvtc_plan,
    "skvq": grouped.skvq_plan,
}


def least_text(config: KVCacheConfig) -> int:
    """Tokens of the shortest text that the configured method can be calibrated with."""
    if config.method not in _FITTED_TO:
        return LEAST_TEXT
    plan = _FITTED_TO[config.method](config)
    # A long text is read in several pieces, each of which begins with sinks: twice is enough.
    needed = [2 * s.n_sink + s.spec.fit_tokens for s in (plan.keys, plan.values)]
    return max(LEAST_TEXT, *needed)


HELD: dict[str, SizeOf] = {
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
