"""Layouts of the methods that rotate vectors and code their coordinates."""

from collections.abc import Callable

from veloxquant.cache.layouts.base import SizeOf, everything, sizes_of, width
from veloxquant.cache.plans import After, AtOnce, LayerPlan, StreamPlan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import CODEBOOK_BITS
from veloxquant.quantizers.sizes import CodecSpec, round_up
from veloxquant.quantizers.specs.affine import AffineTokenSpec
from veloxquant.quantizers.specs.channel_split import ChannelSplitSpec
from veloxquant.quantizers.specs.codebook import CodebookSpec
from veloxquant.quantizers.specs.polar import PolarSpec
from veloxquant.quantizers.specs.sketch import SketchedCodebookSpec, SketchSpec
from veloxquant.quantizers.specs.spectral import SpectralSpec, segments

CALIBRATION_TOKENS = 64
"""Tokens that outlier channels are found in when `n_calib_tokens` is None."""
VALUE_GROUP = 32
"""Channels that share a scale in the values of qjl."""


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


def turboquant_prod_plan(config: KVCacheConfig) -> LayerPlan:
    """Keys as codes of one bit less with a sketch of the rest, values as in turboquant_mse."""
    return LayerPlan(
        _by_loudness(
            config,
            lambda bits: SketchedCodebookSpec(bits, config.jl_dim, config.seed),
            lambda bits: SketchedCodebookSpec(bits, _loud_rows(config), config.seed),
        ),
        _by_loudness(config, lambda bits: flat_values(config, bits)),
    )


def qjl_plan(config: KVCacheConfig) -> LayerPlan:
    """Keys as signs of projections, values in affine groups along channels."""
    return LayerPlan(
        _by_loudness(
            config,
            lambda _: SketchSpec(config.jl_dim, config.seed),
            lambda _: SketchSpec(_loud_rows(config), config.seed),
        ),
        everything(AffineTokenSpec(width(config), VALUE_GROUP)),
    )


def polar_plan(config: KVCacheConfig) -> LayerPlan:
    """Angles and a radius of every key and value."""
    bits = width(config)
    return LayerPlan(
        everything(PolarSpec(bits, config.seed, unbiased=True)),
        everything(PolarSpec(bits, config.seed + 1, unbiased=False)),
    )


def spectral_plan(config: KVCacheConfig) -> LayerPlan:
    """Without a calibration: turboquant_mse. A calibrated layer spends the same bits elsewhere."""
    bits = width(config)
    return LayerPlan(
        everything(CodebookSpec(bits, config.seed, True, "flat")),
        everything(flat_values(config, bits)),
    )


def calibrated_spectral_specs(
    config: KVCacheConfig, dims: tuple[int, int], leading: tuple[int, int]
) -> tuple[SpectralSpec, SpectralSpec]:
    """In eigenbases of the sizes `dims`, keys and values, with so many leading directions each.

    With a sketch the leading directions of keys give their additional bit to it.
    """
    bits = width(config)
    keys, values = (
        segments(dim, bits, front, max(CODEBOOK_BITS))
        for dim, front in zip(dims, leading, strict=True)
    )
    signs = keys[0][0] if config.spectral_apply_qjl and len(keys) > 1 else 0
    if signs:
        keys = ((signs, bits), *keys[1:])
    return (
        SpectralSpec(keys, signs, config.seed, unbiased=True),
        SpectralSpec(values, 0, config.seed + 1, unbiased=False),
    )


def _loud_rows(config: KVCacheConfig) -> int | None:
    """Signs of the loud channels, in proportion to their number and in whole words."""
    if config.jl_dim is None or config.n_outlier_channels is None:
        return None
    return max(32, round_up(config.jl_dim * config.n_outlier_channels // config.head_dim, 32))


def flat_values(config: KVCacheConfig, bits: int) -> CodebookSpec:
    """Values in the flat table with the norm of least squared error."""
    return CodebookSpec(bits, config.seed + 1, False, "flat")


def splits(config: KVCacheConfig) -> bool:
    """Whether loud channels get a stream of their own."""
    return bool(config.n_outlier_channels) and config.enable_outlier_two_stream


def _by_loudness(
    config: KVCacheConfig,
    spec: Callable[[int], CodecSpec],
    loud_spec: Callable[[int], CodecSpec] | None = None,
) -> StreamPlan:
    """One format for all channels, or two of them once the loud channels are known."""
    bits = width(config)
    if not splits(config) or config.n_outlier_channels is None:
        return everything(spec(bits))
    first = config.n_calib_tokens or CALIBRATION_TOKENS
    loud = (loud_spec or spec)(config.bit_width_outlier or bits)
    split = ChannelSplitSpec(spec(bits), loud, config.n_outlier_channels, first)
    return StreamPlan(split, After(first, AtOnce()))


HELD: dict[str, SizeOf] = sizes_of(
    {
        "turboquant_rvq": turboquant_rvq_plan,
        "turboquant_mse": turboquant_mse_plan,
        "turboquant_prod": turboquant_prod_plan,
        "qjl": qjl_plan,
        "polar": polar_plan,
        "spectral": spectral_plan,
    }
)
