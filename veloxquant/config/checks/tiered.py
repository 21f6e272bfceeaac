"""Ranges of the methods that code tokens by class or by age."""

import itertools
from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    bits,
    flag,
    idle,
    integer,
    one_of,
    real,
    refuse,
)


def check_age_tiered(config: KVCacheConfig) -> None:
    """Boundaries in order, widths that do not grow with age."""
    recent = integer(config, "age_recent_boundary", 0)
    mid = integer(config, "age_mid_boundary", 1)
    if mid <= recent:
        raise refuse("age_mid_boundary", mid, f"more than age_recent_boundary={recent}")
    widths = ("age_bits_recent", "age_bits_mid", "age_bits_old")
    for field in widths:
        one_of(config, field, AFFINE_BITS)
    for younger, older in itertools.pairwise(widths):
        most = getattr(config, younger)
        if getattr(config, older) > most:
            raise refuse(older, getattr(config, older), f"at most {younger}={most}")
        if getattr(config, older) == 1 and config.age_bits_recent > 1:
            raise refuse(older, 1, ONE_BIT)
    one_of(config, "age_group_size", AFFINE_GROUPS)
    bits(config, AFFINE_BITS)


ONE_BIT = (
    "at least 2, or 1 with age_bits_recent=1: codes that are narrowed keep the extremes of their "
    "group, and two levels at the extremes are worse than zeros"
)


def check_zipcache(config: KVCacheConfig) -> None:
    """Two widths in order, a share, whole groups."""
    for field in ("zipcache_hi_bits", "zipcache_lo_bits"):
        one_of(config, field, AFFINE_BITS[1:])
    high = config.zipcache_hi_bits
    if config.zipcache_lo_bits >= high:
        raise refuse("zipcache_lo_bits", config.zipcache_lo_bits, f"below zipcache_hi_bits={high}")
    real(config, "zipcache_hi_fraction", 0, 1)
    one_of(config, "zipcache_group_size", AFFINE_GROUPS)
    flag(config, "zipcache_quantize_values")
    bits(config, AFFINE_BITS)


def check_amc(config: KVCacheConfig) -> None:
    """Shares of the tiers, the query term, groups; tiers have a fixed size."""
    high = real(config, "amc_k_high", 0, 1)
    mid = real(config, "amc_k_mid", 0, 1)
    if high + mid > 1:
        raise refuse("amc_k_mid", config.amc_k_mid, f"at most 1 - amc_k_high = {1 - high:g}")
    flag(config, "amc_use_query_saliency")
    real(config, "amc_query_alpha", 0, 1)
    one_of(config, "amc_group_size", AFFINE_GROUPS)
    integer(config, "amc_threshold_window", 8)
    real(config, "amc_gamma", 0, 1, open_low=True)
    if config.amc_adaptive_thresholds is not False:
        raise refuse("amc_adaptive_thresholds", config.amc_adaptive_thresholds, FIXED_TIERS)
    for field in ("amc_threshold_window", "amc_gamma"):
        idle(config, field, "amc_adaptive_thresholds, which is not served")
    if not config.amc_use_query_saliency:
        idle(config, "amc_query_alpha", "amc_use_query_saliency=True")
    if config.amc_calib_variance is not None:
        raise refuse("amc_calib_variance", config.amc_calib_variance, "None" + SAME_RANKS)
    bits(config, AFFINE_BITS)


FIXED_TIERS = (
    "False: tiers take fixed shares of every block, so that memory is known beforehand; "
    "the thresholds are there as functions in quantizers.amc"
)
SAME_RANKS = ": tokens are ranked inside their block, and a common factor changes no rank"


def check_anchorkv(config: KVCacheConfig) -> None:
    """Shares of anchors and residuals, a window, a codebook width."""
    real(config, "anchorkv_anchor_frac", 0, 0.25, open_low=True)
    integer(config, "anchorkv_window", 0)
    real(config, "anchorkv_rho", 0, 1)
    theta = real(config, "anchorkv_theta", 0, 1)
    if theta == 1:
        raise refuse("anchorkv_theta", config.anchorkv_theta, "at least 0 and below 1")
    integer(config, "anchorkv_residual_bits", 1, 4)
    integer(config, "anchorkv_seed", 0)
    bits(config, AFFINE_BITS)


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    "age_tiered": check_age_tiered,
    "amc": check_amc,
    "anchorkv": check_anchorkv,
    "zipcache": check_zipcache,
}
