"""Layouts of the methods that rotate vectors and code their coordinates."""

from collections.abc import Callable

from veloxquant.cache.layouts.base import SizeOf, everything, sizes_of, width
from veloxquant.cache.plans import After, AtOnce, LayerPlan, StreamPlan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import CodecSpec
from veloxquant.quantizers.specs.channel_split import ChannelSplitSpec
from veloxquant.quantizers.specs.codebook import CodebookSpec

CALIBRATION_TOKENS = 64
"""Tokens that outlier channels are found in when `n_calib_tokens` is None."""


def turboquant_rvq_plan(config: KVCacheConfig) -> LayerPlan:
    """Every token coded when it arrives; keys with the unbiased norm, values with the best one."""
    bits = width(config)
    return LayerPlan(
        everything(CodebookSpec(bits, config.seed, unbiased=True)),
        everything(CodebookSpec(bits, config.seed + 1, unbiased=False)),
    )


def turboquant_mse_plan(config: KVCacheConfig) -> LayerPlan:
    """As turboquant_rvq with the flat table; loud channels apart if so configured."""
    return LayerPlan(
        _by_loudness(config, lambda bits: CodebookSpec(bits, config.seed, True, "flat")),
        _by_loudness(config, lambda bits: flat_values(config, bits)),
    )


def flat_values(config: KVCacheConfig, bits: int) -> CodebookSpec:
    """Values in the flat table with the norm of least squared error."""
    return CodebookSpec(bits, config.seed + 1, False, "flat")


def splits(config: KVCacheConfig) -> bool:
    """Whether loud channels get a stream of their own."""
    return bool(config.n_outlier_channels) and config.enable_outlier_two_stream


def _by_loudness(config: KVCacheConfig, spec: Callable[[int], CodecSpec]) -> StreamPlan:
    """One format for all channels, or two of them once the loud channels are known."""
    bits = width(config)
    if not splits(config) or config.n_outlier_channels is None:
        return everything(spec(bits))
    first = config.n_calib_tokens or CALIBRATION_TOKENS
    loud = spec(config.bit_width_outlier or bits)
    split = ChannelSplitSpec(spec(bits), loud, config.n_outlier_channels, first)
    return StreamPlan(split, After(first, AtOnce()))


HELD: dict[str, SizeOf] = sizes_of(
    {"turboquant_rvq": turboquant_rvq_plan, "turboquant_mse": turboquant_mse_plan}
)
