"""Tiers by age as functions on plain arrays: which tier a token is in, and what that costs it."""

from dataclasses import dataclass

import mlx.core as mx

from veloxquant.quantizers.affine import affine_decode, affine_encode
from veloxquant.quantizers.sizes import round_up

RECENT, MID, OLD = 0, 1, 2
EXACT_BITS = 16


@dataclass(frozen=True)
class AgeTierConfig:
    """Bits of one tier: RECENT, MID or OLD."""

    tier: int
    bits: int


def default_age_tiers(bits_recent: int, bits_mid: int, bits_old: int) -> tuple[AgeTierConfig, ...]:
    """The three tiers, youngest first."""
    widths = (bits_recent, bits_mid, bits_old)
    return tuple(AgeTierConfig(tier, width) for tier, width in enumerate(widths))


def assign_age_tiers(ages: list[int], age_recent_boundary: int, age_mid_boundary: int) -> list[int]:
    """Tier of each age, where the newest token has age 0.

    Raises:
        ValueError: when the boundaries are not in order.
    """
    if not 0 <= age_recent_boundary <= age_mid_boundary:
        raise ValueError(
            f"boundaries {age_recent_boundary} and {age_mid_boundary} are not in order; "
            f"the recent one comes first"
        )
    return [(age >= age_recent_boundary) + (age >= age_mid_boundary) for age in ages]


def age_tier_quantize(x: mx.array, bits: int, group_size: int = 32) -> mx.array:
    """Rows (N, D) as one tier returns them: groups of channels, 16 bits and more left alone."""
    if bits >= EXACT_BITS:
        return x
    dim = x.shape[-1]
    room = [(0, 0)] * (x.ndim - 1) + [(0, round_up(dim, group_size) - dim)]
    wide = mx.pad(x.astype(mx.float32), room, mode="edge")
    packed = affine_encode(wide, bits, group_size, mx.float32)
    return affine_decode(packed, bits, group_size, mx.float32)[..., :dim].astype(x.dtype)


def age_tier_quantize_batched(
    raw: mx.array,
    group_tier: list[int],
    tiers_config: tuple[AgeTierConfig, ...],
    group_size: int = 32,
) -> mx.array:
    """Windows (G, N, D), each as its tier returns it.

    Raises:
        ValueError: when there is not one tier a window, or a tier has no configuration.
    """
    if len(group_tier) != raw.shape[0]:
        raise ValueError(f"{len(group_tier)} tiers for {raw.shape[0]} windows; give one each")
    width = {config.tier: config.bits for config in tiers_config}
    if unknown := set(group_tier) - width.keys():
        raise ValueError(f"tier {min(unknown)} has no configuration; known: {sorted(width)}")
    coded = {
        tier: age_tier_quantize(raw, width[tier], group_size) for tier in sorted(set(group_tier))
    }
    tiers = mx.array(group_tier)[:, None, None]
    out = raw
    for tier, rows in coded.items():
        out = mx.where(tiers == tier, rows, out)
    return out


def age_tiered_bytes(
    tier_counts: dict[int, int], tiers: tuple[AgeTierConfig, ...], head_dim: int
) -> int:
    """Bytes of codes of keys and values, scales not counted."""
    width = {config.tier: config.bits for config in tiers}
    return sum(2 * n * head_dim * width[tier] // 8 for tier, n in tier_counts.items())


def full_fp16_bytes(tokens_seen: int, head_dim: int) -> int:
    """Bytes of keys and values in 16 bits."""
    return tokens_seen * head_dim * 2 * 2
