"""Tiers by saliency as functions on plain matrices, for analysis; the cache uses `prefix.py`."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx
import numpy as np

from veloxquant.quantizers.age_tiered import age_tier_quantize, full_fp16_bytes
from veloxquant.quantizers.saliency import rank, unit_rows

HIGH, MID, LOW = 0, 1, 2
LOW_BITS = 4
WINDOW = 64


@dataclass(frozen=True)
class AMCTierConfig:
    """Channels kept and bits of one tier: HIGH, MID or LOW."""

    tier: int
    rank: int
    bits: int


AMC_TIERS = {
    HIGH: AMCTierConfig(HIGH, 128, 16),
    MID: AMCTierConfig(MID, 43, 8),
    LOW: AMCTierConfig(LOW, 8, 4),
}
"""The documented tiers; the cache has others, see `cache/layouts/tiered.py`."""


@dataclass
class AMCThresholdState:
    """The newest saliencies, and the variance that they had when thresholds were set."""

    window: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    calib_variance: float = 1.0


def init_amc_threshold_state(window_size: int, calib_variance: float) -> AMCThresholdState:
    """A state without any saliency.

    Raises:
        ValueError: when the window or the variance is not above 0.
    """
    if window_size < 1 or not calib_variance > 0:
        raise ValueError(
            f"window_size={window_size} and calib_variance={calib_variance} must be above 0"
        )
    return AMCThresholdState(deque(maxlen=window_size), calib_variance)


def amc_saliency(x: mx.array) -> mx.array:
    """Mean magnitude of each row, at most 1: (N, D) to (N,)."""
    return mx.clip(mx.abs(x.astype(mx.float32)).mean(axis=-1), 0, 1)


def amc_query_aware_saliency(
    x: mx.array, keys: mx.array, query: mx.array, alpha: float = 0.5
) -> mx.array:
    """`alpha` times the saliency of rows (N, D) plus the rest of 1 times the cosine of keys.

    Args:
        x: rows whose magnitude counts.
        keys: (N, D); negative cosines and rows without length count as 0.
        query: (D,) or (m, D), of which the mean is taken.
        alpha: within [0, 1].
    """
    return amc_query_aware_saliency_batched(x[None], keys[None], query[None], alpha)[0]


def amc_query_aware_saliency_batched(
    x: mx.array, keys: mx.array, query: mx.array, alpha: float = 0.5
) -> mx.array:
    """As `amc_query_aware_saliency` for G matrices (G, N, D), with queries (G, D) or (G, m, D)."""
    rows = query.astype(mx.float32).reshape(query.shape[0], -1, query.shape[-1])
    cosine = unit_rows(keys.astype(mx.float32)) @ unit_rows(rows).swapaxes(-1, -2)
    return alpha * amc_saliency(x) + (1 - alpha) * mx.maximum(cosine, 0).mean(axis=-1)


def amc_assign_tiers(saliency: mx.array, k_high: float = 0.2, k_mid: float = 0.3) -> list[int]:
    """Tier of each of (N,) tokens: the most salient ceil(k_high·N) first."""
    return cast(list[int], amc_assign_tiers_batched(saliency[None], k_high, k_mid)[0].tolist())


def amc_assign_tiers_batched(
    saliency: mx.array, k_high: float = 0.2, k_mid: float = 0.3
) -> mx.array:
    """Tiers (G, N) int32; of equally salient tokens the older one comes first."""
    n = saliency.shape[-1]
    place, high = rank(saliency), math.ceil(k_high * n)
    below = (place >= high).astype(mx.int32)
    return below + (place >= high + math.ceil(k_mid * n)).astype(mx.int32)


def amc_adaptive_thresholds(
    tau_high_base: float,
    tau_low_base: float,
    state: AMCThresholdState,
    new_saliency_values: mx.array,
    gamma: float = 0.1,
) -> tuple[float, float, AMCThresholdState]:
    """Thresholds that rise while saliencies spread wider than when they were set.

    Each base is multiplied by `1 + gamma·(v - 1)`, v the variance of the window over the one of
    calibration, at most 2. With fewer than two saliencies they stay at their base.

    Returns:
        The high and the low threshold within [0, 1], and the state with the new saliencies.
    """
    values = np.asarray(new_saliency_values.astype(mx.float32)).ravel().tolist()
    window = deque([*state.window, *values], maxlen=state.window.maxlen)
    after = AMCThresholdState(window, state.calib_variance)
    spread = float(np.var(window)) / state.calib_variance if len(window) > 1 else 1.0
    factor = 1 + gamma * (min(spread, 2.0) - 1)
    high, low = (min(1.0, max(0.0, base * factor)) for base in (tau_high_base, tau_low_base))
    return high, min(low, high), after


def amc_apply_rank_mask(x: mx.array, rank: int) -> mx.array:
    """Rows with every channel from `rank` on set to 0."""
    return mx.where(mx.arange(x.shape[-1]) < rank, x, 0).astype(x.dtype)


def amc_quantize_tier(x: mx.array, bits: int, group_size: int = 32) -> mx.array:
    """Rows (N, D) after a round trip in groups of channels; 16 bits and more change nothing."""
    return age_tier_quantize(x, bits, group_size)


def amc_compress_tokens_batched(
    x: mx.array, tiers: mx.array, tier_configs: Mapping[int, AMCTierConfig]
) -> mx.array:
    """Tokens (G, N, D) as their tiers (G, N) return them: channels dropped, the rest quantised."""
    out = mx.zeros_like(x)
    for tier, config in tier_configs.items():
        kept = min(config.rank, x.shape[-1])
        rows = amc_quantize_tier(x[..., :kept], config.bits)
        rows = mx.pad(rows, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] - kept)])
        out = mx.where((tiers == tier)[..., None], rows, out)
    return out


def amc_pack_low_tier(quantized_codes: mx.array) -> tuple[bytes, int]:
    """Codes of 4 bits, two a byte with the first in the low half, and how many there are."""
    codes = np.asarray(quantized_codes).astype(np.uint8).ravel()
    if codes.size and codes.max() >= 1 << LOW_BITS:
        raise ValueError(f"code {codes.max()} does not fit into {LOW_BITS} bits")
    even = np.append(codes, np.uint8(0)) if codes.size % 2 else codes
    return (even[0::2] | (even[1::2] << LOW_BITS)).tobytes(), codes.size


def amc_fp16_bytes(tier_counts: Mapping[int, int], head_dim: int) -> int:
    """Bytes of keys and values of so many tokens in each documented tier, scales not counted."""
    return sum(
        2 * n * min(AMC_TIERS[tier].rank, head_dim) * AMC_TIERS[tier].bits // 8
        for tier, n in tier_counts.items()
    )


def full_amc_fp16_bytes(tokens_seen: int, head_dim: int) -> int:
    """Bytes of keys and values in 16 bits."""
    return full_fp16_bytes(tokens_seen, head_dim)
