"""Layouts of the methods that quantise groups of neighbours: kivi and its kin."""

from veloxquant.cache.layouts.base import SizeOf, sizes_of, width
from veloxquant.cache.plans import (
    Absolute,
    After,
    LayerPlan,
    Schedule,
    StreamPlan,
    Trailing,
    WholeBlocks,
)
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import WINDOW_STEP, Held, LayerShape
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.grouped import BoostedSpec, PermutedSpec, fit_length
from veloxquant.quantizers.specs.head_bits import HeadBitsChannelSpec, HeadBitsTokenSpec
from veloxquant.quantizers.specs.nuq import NuqChannelSpec, NuqTokenSpec


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


def kitty_plan(config: KVCacheConfig) -> LayerPlan:
    """As kivi in the low width, with boosted key channels."""
    low, group, residual = config.kitty_lo_bit, config.kitty_group_size, config.residual_length
    keys = BoostedSpec(low, config.kitty_hi_bit, group, config.kitty_hi_fraction)
    return LayerPlan(
        StreamPlan(keys, WholeBlocks(residual)),
        StreamPlan(AffineTokenSpec(low, group), Trailing(residual)),
    )


KVQUANT_FIT = 64
"""Least tokens that kvquant fits its levels to."""


def kvquant_plan(config: KVCacheConfig) -> LayerPlan:
    """Everything behind the sinks coded with the levels of the first tokens, or of its block."""
    group, refit = config.kvquant_group_size, config.kvquant_refit_interval
    fit = max(group, KVQUANT_FIT)
    sweeps, share = config.kvquant_lloyd_iters, config.kvquant_outlier_fraction
    common = (config.kvquant_bits, sweeps, share, fit, refit)
    sinks = config.kvquant_n_sink
    schedule: Schedule = WholeBlocks(refit)
    if not refit:
        schedule = After(fit + WINDOW_STEP, Absolute(sinks, WholeBlocks(WINDOW_STEP)))
    return LayerPlan(
        StreamPlan(NuqChannelSpec(*common), schedule, sinks),
        StreamPlan(NuqTokenSpec(*common, group), schedule, sinks),
    )


def skvq_plan(config: KVCacheConfig) -> LayerPlan:
    """Tokens reordered and clipped once they leave the window, fitted to the first one."""
    window, fit = config.skvq_window, fit_length(config.skvq_window)

    def stream(bits: int) -> StreamPlan:
        spec = PermutedSpec(
            bits, config.skvq_group_size, fit, config.skvq_reorder, config.skvq_clip_search,
            config.skvq_clip_alpha,
        )  # fmt: skip
        leaving = Absolute(config.skvq_n_sink, Trailing(window))
        first = window + spec.fit_tokens + WINDOW_STEP
        return StreamPlan(spec, After(first, leaving), config.skvq_n_sink)

    return LayerPlan(stream(config.skvq_bits_key), stream(config.skvq_bits_value))


def adakv_plan(config: KVCacheConfig, heads: int) -> LayerPlan:
    """Blocks in widths by head, under one budget for `heads` KV heads."""
    choices = (config.adakv_lo_bit, config.adakv_mid_bit, config.adakv_hi_bit)
    group = config.adakv_group_size
    common = (choices, config.adakv_target_avg_bits, heads, group)
    keys = HeadBitsChannelSpec(
        *common, config.adakv_update_interval, config.adakv_importance, config.adakv_obs_window
    )
    return LayerPlan(
        StreamPlan(keys, WholeBlocks(group)),
        StreamPlan(HeadBitsTokenSpec(*common), WholeBlocks(group)),
    )


def adakv_held(config: KVCacheConfig, shape: LayerShape, tokens: int, decoded: int = 0) -> Held:
    """Size of a layer, whose heads share a budget."""
    del decoded
    return adakv_plan(config, shape.n_kv_heads).held(shape, tokens)


HELD: dict[str, SizeOf] = {"adakv": adakv_held} | sizes_of(
    {
        "kivi": kivi_plan,
        "kivi_sink": kivi_sink_plan,
        "kitty": kitty_plan,
        "kvquant": kvquant_plan,
        "skvq": skvq_plan,
    }
)
