"""Layouts of the methods that quantise groups of neighbours: kivi and its kin."""

from veloxquant.cache.layouts.base import SizeOf, sizes_of, width
from veloxquant.cache.plans import LayerPlan, Schedule, StreamPlan, Trailing, WholeBlocks
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec


def kivi_plan(config: KVCacheConfig, n_sink: int = 0) -> LayerPlan:
    """Keys per channel in blocks of the residual length, values per token behind a window."""
    bits, group, residual = width(config), config.kivi_group_size, config.residual_length
    keys: Schedule = WholeBlocks(residual)
    return LayerPlan(
        StreamPlan(AffineChannelSpec(bits, group), keys, n_sink),
        StreamPlan(AffineTokenSpec(bits, group), Trailing(residual), n_sink),
    )


def kivi_sink_plan(config: KVCacheConfig) -> LayerPlan:
    """Kivi counted from the first token after the sinks."""
    return kivi_plan(config, config.n_sink_tokens)


HELD: dict[str, SizeOf] = sizes_of({"kivi": kivi_plan, "kivi_sink": kivi_sink_plan})
