"""Tiers by age on plain arrays."""

import mlx.core as mx
import pytest

from veloxquant.quantizers.age_tiered import (
    MID,
    OLD,
    RECENT,
    AgeTierConfig,
    age_tier_quantize,
    age_tier_quantize_batched,
    age_tiered_bytes,
    assign_age_tiers,
    default_age_tiers,
    full_fp16_bytes,
)

TIERS = default_age_tiers(8, 4, 2)


@pytest.mark.parametrize("total", [0, 1, 128, 129, 1024, 4096])
def test_counts_of_the_tiers(total: int) -> None:
    tiers = assign_age_tiers(list(range(total)), 128, 1024)
    assert [tiers.count(t) for t in (RECENT, MID, OLD)] == [
        min(total, 128), min(max(total - 128, 0), 896), max(total - 1024, 0),
    ]  # fmt: skip


def test_boundaries_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="not in order"):
        assign_age_tiers([0], 4, 3)


def test_a_round_trip_and_its_limits() -> None:
    x = mx.random.normal((10, 80), key=mx.random.key(1)).astype(mx.float16)
    assert age_tier_quantize(x, 16) is x
    errors = [mx.abs(age_tier_quantize(x, bits) - x).max().item() for bits in (8, 4, 2)]
    assert errors == sorted(errors)
    assert errors[0] < 0.02
    assert age_tier_quantize(x, 4).dtype == mx.float16


def test_every_window_at_the_width_of_its_tier() -> None:
    x = mx.random.normal((3, 6, 64), key=mx.random.key(2))
    out = age_tier_quantize_batched(x, [OLD, RECENT, MID], TIERS)
    for i, bits in enumerate((2, 8, 4)):
        assert mx.array_equal(out[i], age_tier_quantize(x[i], bits)).item()
    with pytest.raises(ValueError, match="one each"):
        age_tier_quantize_batched(x, [OLD], TIERS)
    with pytest.raises(ValueError, match="no configuration"):
        age_tier_quantize_batched(x, [0, 1, 7], TIERS)


def test_bytes_from_counts() -> None:
    assert TIERS[1] == AgeTierConfig(MID, 4)
    counts = {RECENT: 128, MID: 896, OLD: 3072}
    assert age_tiered_bytes(counts, TIERS, 128) == 2 * 128 * (128 + 448 + 768)
    assert full_fp16_bytes(4096, 128) == 2_097_152
