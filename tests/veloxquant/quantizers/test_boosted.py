"""Boosted channels: the two planes, which channels are chosen, what they gain."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.dsa.mlx_pack import unpack
from veloxquant.quantizers.boosted import BoostedCodec, liveliest
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.kitty import (
    compute_running_variance,
    hi_mask_from_variance_batched,
    quantize_mixed_channels,
    quantize_mixed_channels_batched,
    rank_channels_by_sensitivity,
)
from veloxquant.quantizers.specs.affine import AffineChannelSpec
from veloxquant.quantizers.specs.grouped import BoostedSpec

P = 32


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def lively(tokens: int = 128, dim: int = 64, heads: int = 2) -> mx.array:
    """A quarter of the channels is six times as large."""
    factor = mx.where(mx.random.permutation(dim, key=mx.random.key(3)) < dim // 4, 6.0, 1.0)
    return normal(1, heads, tokens, dim) * factor


def codec(fraction: float, low: int = 2, high: int = 4, dim: int = 64) -> BoostedCodec:
    return codec_for(BoostedSpec(low, high, P, fraction), dim)


def lost(made: BoostedCodec, x: mx.array) -> float:
    return mx.square(made.decode(made.encode(x), mx.float32) - x).mean().item()


@pytest.mark.parametrize("low", [2, 4])
def test_nothing_boosted_is_the_plain_format(low: int) -> None:
    x = lively()
    plain = codec_for(AffineChannelSpec(low, P), 64)
    packed = codec(0.0, low, 8).encode(x)
    assert packed.keys() == plain.encode(x).keys()
    for name, array in plain.encode(x).items():
        assert mx.array_equal(array, packed[name]).item()


@pytest.mark.parametrize(("low", "high"), [(2, 3), (2, 4), (4, 8), (2, 8)])
def test_everything_boosted_is_the_plain_format_of_the_high_width(low: int, high: int) -> None:
    x = lively()
    made, plain = codec(1.0, low, high), codec_for(AffineChannelSpec(high, P), 64)
    packed, wanted = made.encode(x), plain.encode(x)
    below = unpack(packed["w"], low, 128)
    above = unpack(packed["h"], high - low, P)  # (1, H, pages, D, P)
    above = above.transpose(0, 1, 3, 2, 4).reshape(1, 2, 64, 128)
    assert mx.array_equal((above << low) | below, unpack(wanted["w"], high, 128)).item()
    assert mx.array_equal(packed["s"], wanted["s"]).item()
    assert mx.array_equal(packed["b"], wanted["b"]).item()
    got = made.decode(packed, mx.float32)
    assert mx.abs(got - plain.decode(wanted, mx.float32)).max().item() < 1e-5


def test_the_error_falls_with_the_share() -> None:
    x = lively()
    errors = [lost(codec(f), x) for f in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] <= 0.2 * errors[0]


def test_the_channels_of_a_page_are_those_of_largest_variance() -> None:
    x = lively(dim=80) + 50 * normal(1, 2, 1, 80, seed=4)
    packed = codec(0.3, dim=80).encode(x)
    chosen = np.array(packed["c"])
    assert chosen.shape == (1, 2, 4, 24)
    pages = np.array(x).reshape(1, 2, 4, P, 80).var(axis=3)
    wanted = np.sort(np.argsort(-pages, axis=-1, kind="stable")[..., :24], axis=-1)
    assert (chosen == wanted).all()


def test_equal_channels_are_taken_from_the_front() -> None:
    assert liveliest(mx.zeros((2, 8)), 3).tolist() == [[0, 1, 2]] * 2
    constant = mx.ones((1, 1, P, 64))
    packed = codec(0.25).encode(constant)
    assert packed["c"][0, 0, 0].tolist() == list(range(16))
    assert mx.array_equal(codec(0.25).decode(packed, mx.float32), constant).item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_elements_are_within_half_a_step_of_their_channel(dtype: mx.Dtype) -> None:
    x, made = lively().astype(dtype), codec(0.25, 4, 8)
    packed = made.encode(x)
    assert packed["s"].dtype == packed["b"].dtype == dtype
    true = x.astype(mx.float32)
    error = mx.abs(made.decode(packed, mx.float32) - true)
    step = mx.repeat(packed["s"].astype(mx.float32), P, axis=-1).swapaxes(-1, -2)
    # Minimum and step are rounded to the type: the grid may end a little before the extremes.
    room = {mx.float32: 1e-5, mx.float16: 2**-9, mx.bfloat16: 2**-6}[dtype]
    assert (error <= step * 0.5 + room * mx.abs(true).max()).all().item()


def test_products_are_those_of_the_unpacked_rows() -> None:
    x, q, w = lively(), normal(1, 2, 3, 64, seed=5), normal(1, 2, 3, 128, seed=6)
    for fraction in (0.0, 0.25, 1.0):
        made = codec(fraction)
        packed = made.encode(x)
        rows = made.decode(packed, mx.float32)
        assert mx.abs(made.scores(q, packed) - q @ rows.swapaxes(-1, -2)).max().item() < 1e-3
        assert mx.abs(made.mix(w, packed) - w @ rows).max().item() < 1e-3


def test_room_that_is_not_used_yet_gives_zeros() -> None:
    x, made = lively(), codec(0.25)
    packed = made.encode(x)
    wide = {}
    for name, array in packed.items():
        place = made.axes[name]
        shape = list(array.shape)
        wide[name] = mx.concatenate([array, mx.zeros(shape, array.dtype)], axis=place.axis)
    q = normal(1, 2, 3, 64)
    scores = made.scores(q, wide)
    assert mx.abs(scores[..., :128] - made.scores(q, packed)).max().item() < 1e-4
    assert not mx.abs(scores[..., 128:]).max().item()


# ---- free functions -------------------------------------------------------------------------


def test_ranking_splits_the_channels() -> None:
    x = lively()[0, 0]
    high, low = rank_channels_by_sensitivity(x, 0.25)
    assert high == sorted(high)
    assert low == sorted(low)
    assert sorted(high + low) == list(range(64))
    assert len(high) == 16
    variance = x.var(axis=0)
    assert min(variance[i].item() for i in high) > max(variance[i].item() for i in low)
    assert rank_channels_by_sensitivity(x, 0.0)[0] == []
    assert rank_channels_by_sensitivity(x, 1.0)[1] == []


def test_running_variance_is_that_of_all_values() -> None:
    x = normal(50, 8) + 3
    got = compute_running_variance(x.sum(axis=0), mx.square(x).sum(axis=0), 50)
    assert mx.abs(got - x.var(axis=0)).max().item() < 1e-4
    assert not mx.abs(compute_running_variance(x.sum(axis=0), x.sum(axis=0), 1)).max().item()


def test_mixed_widths_follow_the_mask() -> None:
    x = mx.stack([lively()[0, 0], lively()[0, 1]])[:, :70]
    mask = hi_mask_from_variance_batched(x.var(axis=1), 0.25)
    assert mask.sum(axis=-1).tolist() == [16, 16]
    mixed = quantize_mixed_channels_batched(x, mask)
    assert mixed.shape == x.shape
    errors = [mx.square(quantize_mixed_channels_batched(x, m) - x).mean().item()
              for m in (mx.zeros_like(mask), mask, mx.ones_like(mask))]  # fmt: skip
    assert errors[0] > errors[1] > errors[2]
    high = [i for i in range(64) if mask[0, i].item()]
    low = [i for i in range(64) if not mask[0, i].item()]
    one = quantize_mixed_channels(x[0].astype(mx.float16), high, low)
    assert one.dtype == mx.float16
    assert mx.abs(one.astype(mx.float32) - mixed[0]).mean().item() < 0.02
    with pytest.raises(ValueError, match="once"):
        quantize_mixed_channels(x[0], high, low[:-1])
