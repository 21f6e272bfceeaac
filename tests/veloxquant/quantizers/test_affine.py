"""Affine codecs: error bounds, published errors on Gaussian data, products from the packed form."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.quantizers.affine import affine_decode, affine_encode
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec

# At two bits see below: the encoder there is MLX's own.
MEAN_SQUARE = {3: 0.0281, 4: 0.0061, 8: 2e-5}


def gaussian(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@settings(deadline=None, max_examples=40)
@given(
    bits=st.sampled_from([1, 2, 3, 4, 5, 6, 8]),
    group=st.sampled_from([32, 64, 128]),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    shift=st.floats(-3, 3, width=16),
    seed=st.integers(0, 999),
)
def test_errors_stay_within_half_a_step(
    bits: int, group: int, scale: float, shift: float, seed: int
) -> None:
    x = scale * (gaussian(3, 128, seed=seed) + shift)
    packed = affine_encode(x, bits, group, mx.float32)
    error = mx.abs(affine_decode(packed, bits, group, mx.float32) - x)
    step = mx.repeat(mx.abs(packed["s"]), group, axis=-1)
    assert packed["w"].shape == (3, 128 * bits // 32)
    if bits >= 3:  # narrower encoders choose a smaller error on the whole over this bound
        assert (error <= 0.5 * step * (1 + 1e-4) + 1e-5 * scale).all().item()
    elif bits == 2:
        assert (error <= 1.01 * step + 1e-5 * scale).all().item()


@pytest.mark.parametrize("bits", MEAN_SQUARE)
def test_min_max_grids_have_the_published_error(bits: int) -> None:
    x = gaussian(2_000, 128)
    error = affine_decode(affine_encode(x, bits, 32, mx.float32), bits, 32, mx.float32) - x
    assert mx.square(error).mean().item() == pytest.approx(MEAN_SQUARE[bits], rel=0.08)


@settings(deadline=None, max_examples=20)
@given(bits=st.sampled_from([1, 2, 3, 4, 8]), power=st.integers(-40, 20), seed=st.integers(0, 999))
def test_codes_do_not_depend_on_the_scale_of_the_rows(bits: int, power: int, seed: int) -> None:
    x = gaussian(3, 128, seed=seed)
    one, other = (affine_encode(a, bits, 32, mx.float32) for a in (x, x * 2.0**power))
    assert mx.array_equal(one["w"], other["w"]).item()
    assert mx.array_equal(one["s"] * 2.0**power, other["s"]).item()
    assert mx.array_equal(one["b"] * 2.0**power, other["b"]).item()


def test_two_bits_use_the_shifted_grid_of_mlx() -> None:
    x = gaussian(2_000, 128)
    packed = affine_encode(x, 2, 32, mx.float32)
    error = affine_decode(packed, 2, 32, mx.float32) - x
    assert mx.square(error).mean().item() == pytest.approx(0.132, rel=0.04)
    assert mx.array_equal(packed["w"], mx.quantize(x, 32, 2)[0]).item()


def test_one_bit_loses_what_the_mean_deviation_loses() -> None:
    x = gaussian(2_000, 128)
    error = affine_decode(affine_encode(x, 1, 128, mx.float32), 1, 128, mx.float32) - x
    assert mx.square(error).mean().item() == pytest.approx(0.36, rel=0.04)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_constant_and_zero_groups_are_exact(bits: int) -> None:
    for value in (0.0, 3.25, -7.5):
        x = mx.full((2, 64), value)
        got = affine_decode(affine_encode(x, bits, 32, mx.float32), bits, 32, mx.float32)
        assert mx.abs(got - x).max().item() <= 1e-6 * abs(value)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_sixteen_bit_scales_cost_little(bits: int) -> None:
    x = gaussian(1_000, 64).astype(mx.bfloat16)
    errors = []
    for dtype in (mx.bfloat16, mx.float32):
        got = affine_decode(affine_encode(x, bits, 32, dtype), bits, 32, mx.float32)
        errors.append(mx.square(got - x.astype(mx.float32)).mean().item())
    # A rounded step misses the far edge: up to 2^-9 of the range, which only 8 bits notice.
    assert errors[0] <= errors[1] * (1.15 if bits < 8 else 3)


SPECS = [
    *(AffineTokenSpec(bits, group) for bits, group in ((2, 32), (3, 32), (4, 64))),
    *(AffineChannelSpec(bits, group) for bits, group in ((1, 32), (2, 32), (4, 64))),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.describe())
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_products_equal_those_of_the_decoded_rows(spec, dim: int) -> None:
    codec = codec_for(spec, dim)
    x = gaussian(2, 3, 128, dim, seed=dim)
    packed = codec.encode(x)
    rows = codec.decode(packed, mx.float32)
    assert rows.shape == x.shape
    q, w = gaussian(2, 3, 4, dim, seed=1), mx.softmax(gaussian(2, 3, 4, 128, seed=2), axis=-1)
    assert mx.abs(codec.scores(q, packed) - q @ rows.swapaxes(-1, -2)).max().item() < 2e-4
    assert mx.abs(codec.mix(w, packed) - w @ rows).max().item() < 2e-5
    bytes_ = sum(a.nbytes for a in packed.values())
    assert bytes_ == 6 * spec.nbytes(128, dim, 4)


@pytest.mark.parametrize(("bits", "share"), [(2, 0.2), (3, 0.05), (4, 0.05)])
def test_an_outlier_channel_hurts_only_itself_per_channel(bits: int, share: float) -> None:
    x = gaussian(1, 1, 128, 64) * mx.where(mx.arange(64) == 5, 50.0, 1.0)
    others = mx.arange(64) != 5
    errors = []
    for spec in (AffineChannelSpec(bits, 32), AffineTokenSpec(bits, 32)):
        codec = codec_for(spec, 64)
        error = mx.square(codec.decode(codec.encode(x), mx.float32) - x)[..., :32]
        errors.append((error * others[:32]).sum().item())
    assert errors[0] <= share * errors[1]


def test_channels_may_be_permuted() -> None:
    codec = codec_for(AffineChannelSpec(2, 32), 64)
    x = gaussian(1, 2, 64, 64)
    order = mx.array(np.random.default_rng(0).permutation(64).astype(np.uint32))
    rows = codec.decode(codec.encode(x), mx.float32)
    assert mx.array_equal(codec.decode(codec.encode(x[..., order]), mx.float32), rows[..., order])
