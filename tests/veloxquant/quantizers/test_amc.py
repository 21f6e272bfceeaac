"""Tiers by saliency on plain matrices."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from veloxquant.quantizers.amc import (
    AMC_TIERS,
    HIGH,
    LOW,
    MID,
    amc_adaptive_thresholds,
    amc_apply_rank_mask,
    amc_assign_tiers,
    amc_assign_tiers_batched,
    amc_compress_tokens_batched,
    amc_fp16_bytes,
    amc_pack_low_tier,
    amc_quantize_tier,
    amc_query_aware_saliency,
    amc_query_aware_saliency_batched,
    amc_saliency,
    full_amc_fp16_bytes,
    init_amc_threshold_state,
)
from veloxquant.quantizers.amc_calibration import amc_calibrate_channel_order, amc_permute_weights
from veloxquant.quantizers.prefix import variance_order


def rows(*shape: int, seed: int = 1) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize("n", [1, 5, 64, 100])
@pytest.mark.parametrize(("high", "mid"), [(0.2, 0.3), (0, 0), (1, 0), (0.5, 0.5)])
def test_shares_are_rounded_up(n: int, high: float, mid: float) -> None:
    tiers = amc_assign_tiers(rows(n), high, mid)
    first = math.ceil(high * n)
    second = min(math.ceil(mid * n), n - first)
    assert [tiers.count(t) for t in (HIGH, MID, LOW)] == [first, second, n - first - second]


def test_ties_go_to_the_older() -> None:
    tiers = amc_assign_tiers_batched(mx.zeros((2, 10)))
    assert tiers.tolist() == [[0, 0, 1, 1, 1, 2, 2, 2, 2, 2]] * 2


def test_saliency_is_mean_magnitude_and_the_query_joins_it() -> None:
    x = mx.array([[0.5, -0.5], [3.0, 3.0], [0.0, 0.0]])
    assert amc_saliency(x).tolist() == [0.5, 1.0, 0.0]
    query = mx.array([1.0, 1.0])
    assert mx.allclose(amc_query_aware_saliency(x, x, query, 1.0), amc_saliency(x)).item()
    near = amc_query_aware_saliency(x, x, query, 0.0)
    assert mx.allclose(near, mx.array([0.0, 1.0, 0.0])).item()
    both = amc_query_aware_saliency_batched(x[None], x[None], query[None], 0.25)[0]
    assert mx.allclose(both, 0.25 * amc_saliency(x) + 0.75 * near).item()


def test_thresholds_follow_the_spread() -> None:
    state = init_amc_threshold_state(32, 0.01)
    assert amc_adaptive_thresholds(0.6, 0.3, state, mx.array([]))[:2] == (0.6, 0.3)
    calm = 0.5 + 0.1 * rows(400)
    for part in mx.split(calm, 10):
        high, low, state = amc_adaptive_thresholds(0.6, 0.3, state, part, gamma=0.1)
    assert len(state.window) == 32
    assert high == pytest.approx(0.6, rel=0.08)
    wild_high, _, _ = amc_adaptive_thresholds(0.6, 0.3, state, 0.5 + 0.3 * rows(32), gamma=0.5)
    assert 1 >= wild_high > high > low
    with pytest.raises(ValueError, match="above 0"):
        init_amc_threshold_state(0, 1.0)


def test_rank_mask_and_round_trip() -> None:
    x = rows(9, 40)
    masked = amc_apply_rank_mask(x, 12)
    assert mx.array_equal(masked[:, :12], x[:, :12]).item()
    assert mx.abs(masked[:, 12:]).max().item() == 0
    assert amc_quantize_tier(x, 16) is x
    lost = [mx.abs(amc_quantize_tier(x, b) - x).max().item() for b in (8, 4, 2)]
    assert 0 < lost[0] < lost[1] < lost[2]


def test_every_token_as_its_tier_says() -> None:
    x, tiers = rows(2, 10, 128), mx.array([[0, 1, 2, 0, 1, 2, 0, 1, 2, 0]] * 2)
    out = amc_compress_tokens_batched(x, tiers, AMC_TIERS)
    assert mx.array_equal(out[:, 0], x[:, 0]).item()
    assert (out[:, 1, 43:] == 0).all().item()
    assert (out[:, 2, 8:] == 0).all().item()
    assert mx.allclose(out[:, 1, :43], amc_quantize_tier(x[..., :43], 8)[:, 1]).item()


def test_packing_and_bytes() -> None:
    packed, n = amc_pack_low_tier(mx.array([1, 2, 15, 4, 5]))
    assert packed == bytes([0x21, 0x4F, 0x05])
    assert n == 5
    with pytest.raises(ValueError, match="does not fit"):
        amc_pack_low_tier(mx.array([16]))
    assert amc_fp16_bytes({HIGH: 2, MID: 3, LOW: 5}, 128) == 2 * (2 * 256 + 3 * 43 + 5 * 4)
    assert full_amc_fp16_bytes(10, 128) == 5120


def test_channels_by_falling_variance() -> None:
    scale = mx.array([1.0, 4.0, 2.0, 3.0])
    perm = amc_calibrate_channel_order(rows(500, 4) * scale)
    assert perm.tolist() == [1, 3, 2, 0]
    weight = rows(4, 6)
    assert mx.array_equal(amc_permute_weights(weight, perm, 0), weight[perm]).item()


def test_permuted_weights_give_the_same_logits() -> None:
    """Pairs stay together, so rotary positions act on them as before."""
    dim, hidden, n = 16, 24, 12
    x, wq, wk = rows(n, hidden), rows(dim, hidden, seed=2), rows(dim, hidden, seed=3)
    theta = 100.0 ** (-np.arange(dim // 2) / (dim // 2))
    angle = mx.array(np.outer(np.arange(n), theta).astype(np.float32))

    def rotate(y: mx.array, order: mx.array) -> mx.array:
        turn = mx.concatenate([angle, angle], axis=-1)[:, order]
        back = mx.argsort(order)
        plain = y[:, back]
        other = mx.concatenate([-plain[:, dim // 2 :], plain[:, : dim // 2]], axis=-1)[:, order]
        return y * mx.cos(turn) + other * mx.sin(turn)

    same = mx.arange(dim)
    perm = variance_order((x @ wk.T)[None, None], pairs=True).reshape(-1).astype(mx.int32)
    q, k = rotate(x @ wq.T, same), rotate(x @ wk.T, same)
    rope = nn.RoPE(dim, base=100.0)
    assert mx.allclose(q[None, None], rope((x @ wq.T)[None, None]), atol=1e-3).item()
    pq = rotate(x @ amc_permute_weights(wq, perm, 0).T, perm)
    pk = rotate(x @ amc_permute_weights(wk, perm, 0).T, perm)
    assert mx.allclose(q @ k.T, pq @ pk.T, atol=1e-3).item()
    pairs = perm.reshape(-1, 2)
    assert mx.array_equal(pairs[:, 0] + dim // 2, pairs[:, 1]).item()
