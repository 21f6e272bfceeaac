"""Layouts of the methods that keep latents, or share them among layers."""

from veloxquant.cache.layouts.base import SizeOf, everything, sizes_of
from veloxquant.cache.plans import After, LayerPlan, StreamPlan, WholeBlocks
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.specs.latent import ScheduledSpec
from veloxquant.quantizers.specs.plain import PlainSpec


def svdq_plan(config: KVCacheConfig) -> LayerPlan:
    """Keys exact until the basis is fitted, then blocks of latents; values exact."""
    spec = ScheduledSpec(
        config.svdq_rank, config.svdq_energy_threshold, tuple(config.svdq_bit_schedule),
        config.svdq_group_size,
    )  # fmt: skip
    keys = StreamPlan(spec, After(spec.fit_tokens, WholeBlocks(spec.block)))
    return LayerPlan(keys, everything(PlainSpec()))


HELD: dict[str, SizeOf] = sizes_of({"svdq": svdq_plan})
