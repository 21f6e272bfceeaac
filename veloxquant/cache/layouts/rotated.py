"""Layouts of the methods that rotate vectors and code their coordinates."""

from veloxquant.cache.layouts.base import SizeOf, everything, sizes_of, width
from veloxquant.cache.plans import LayerPlan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.specs.codebook import CodebookSpec


def turboquant_rvq_plan(config: KVCacheConfig) -> LayerPlan:
    """Every token coded when it arrives; keys with the unbiased norm, values with the best one."""
    bits = width(config)
    return LayerPlan(
        everything(CodebookSpec(bits, config.seed, unbiased=True)),
        everything(CodebookSpec(bits, config.seed + 1, unbiased=False)),
    )


HELD: dict[str, SizeOf] = sizes_of({"turboquant_rvq": turboquant_rvq_plan})
