"""Rotated codes: published error, nesting planes, unbiased products, exact invariances."""

import itertools

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.dsa.mlx_pack import unpack
from veloxquant.math.lloyd_max import normal_levels
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.codebook import CodebookSpec

# Conditional tables, on the sphere of 128 dimensions about 1 % lower than for the Gaussian.
MEAN_SQUARE = {1: 0.3609, 2: 0.1163, 3: 0.0343, 4: 0.0093}


def gaussian(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def keys_codec(bits: int, dim: int = 128):
    return codec_for(CodebookSpec(bits, 42, unbiased=True), dim)


def values_codec(bits: int, dim: int = 128):
    return codec_for(CodebookSpec(bits, 42, unbiased=False), dim)


@pytest.mark.parametrize("bits", MEAN_SQUARE)
def test_values_have_the_published_error(bits: int) -> None:
    codec, x = values_codec(bits), gaussian(1, 1, 3_000, 128)
    lost = mx.square(codec.decode(codec.encode(x), mx.float32) - x).sum() / mx.square(x).sum()
    assert lost.item() == pytest.approx(MEAN_SQUARE[bits], rel=0.02)


def test_error_falls_with_every_bit() -> None:
    x = gaussian(1, 1, 500, 128)
    errors = []
    for bits in range(1, 7):
        codec = values_codec(bits)
        errors.append(mx.square(codec.decode(codec.encode(x), mx.float32) - x).mean().item())
    assert all(b < 0.45 * a for a, b in itertools.pairwise(errors))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_without_the_last_plane_the_code_is_the_coarser_one(bits: int, dim: int) -> None:
    x = gaussian(2, 2, 40, dim)
    codec = keys_codec(bits, dim)
    lanes, codes, start = -(-dim // 32) * 32, mx.zeros((), dtype=mx.uint32), 0
    words = codec.encode(x)["w"]
    for width, shift in codec.spec.planes()[:-1]:
        stop = start + lanes * width // 32
        codes = codes | (unpack(words[..., start:stop], width, lanes) << (shift - 1))
        start = stop
    levels = normal_levels(bits - 1)
    y = codec.rotation.rotate(x / mx.linalg.norm(x, axis=-1, keepdims=True)) * dim**0.5
    coarse = sum((y > (a + b) / 2).astype(mx.uint32) for a, b in itertools.pairwise(levels))
    # A coordinate within rounding of a threshold may fall on either side.
    assert (codes[..., :dim] != coarse).astype(mx.float32).mean().item() < 1e-3
    if bits == 2:
        assert mx.array_equal(words[..., : lanes // 32], keys_codec(1, dim).encode(x)["w"]).item()


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_key_products_are_unbiased(bits: int) -> None:
    codec = keys_codec(bits)
    x, q = gaussian(1, 1, 4_000, 128), gaussian(1, 1, 16, 128, seed=1)
    true, got = q @ x.swapaxes(-1, -2), codec.scores(q, codec.encode(x))
    slope = (true * got).sum() / mx.square(true).sum()
    assert slope.item() == pytest.approx(1, abs=0.01)
    biased = values_codec(bits)
    below = (true * biased.scores(q, biased.encode(x))).sum() / mx.square(true).sum()
    assert below.item() < 1 - 0.7 * MEAN_SQUARE[bits]


@settings(deadline=None, max_examples=25)
@given(
    bits=st.integers(1, 6),
    power=st.integers(-20, 20),
    dim=st.sampled_from([32, 64, 80, 100, 128]),
    seed=st.integers(0, 99),
)
def test_codes_do_not_depend_on_length(bits: int, power: int, dim: int, seed: int) -> None:
    x = gaussian(1, 2, 5, dim, seed=seed)
    codec = keys_codec(bits, dim)
    one, other = codec.encode(x), codec.encode(x * 2.0**power)
    assert mx.array_equal(one["w"], other["w"]).item()
    assert mx.allclose(one["n"] * 2.0**power, other["n"], rtol=1e-5).item()


@settings(deadline=None, max_examples=20)
@given(
    bits=st.integers(1, 6),
    dim=st.sampled_from([64, 80, 96, 100, 128, 256]),
    tokens=st.integers(1, 40),
)
def test_products_equal_those_of_the_decoded_rows(bits: int, dim: int, tokens: int) -> None:
    codec, x = keys_codec(bits, dim), gaussian(2, 2, tokens, dim, seed=tokens)
    packed = codec.encode(x)
    rows = codec.decode(packed, mx.float32)
    q, w = gaussian(2, 2, 3, dim, seed=1), mx.softmax(gaussian(2, 2, 3, tokens, seed=2), axis=-1)
    assert mx.abs(codec.scores(q, packed) - q @ rows.swapaxes(-1, -2)).max().item() < 1e-3
    assert mx.abs(codec.mix(w, packed) - w @ rows).max().item() < 1e-4
    assert sum(a.nbytes for a in packed.values()) == 4 * codec.spec.nbytes(tokens, dim, 4)


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("dim", [64, 100, 128])
def test_a_lone_coordinate_and_zero(bits: int, dim: int) -> None:
    codec = values_codec(bits, dim)
    lone = mx.concatenate([mx.eye(dim)[None, None] * 3, mx.zeros((1, 1, 1, dim))], axis=2)
    rows = codec.decode(codec.encode(lone), mx.float32)
    lost = mx.square(rows - lone).sum(-1)[..., :-1].mean().item() / 9
    assert lost < {1: 0.45, 2: 0.2, 3: 0.1}[bits]
    assert not mx.abs(rows[:, :, -1]).max().item()


def test_lengths_over_the_half_precision_range() -> None:
    codec = values_codec(4)
    for dtype in (mx.float32, mx.bfloat16):
        x = (gaussian(1, 1, 20, 128) * 1e6).astype(dtype)
        rows = codec.decode(codec.encode(x), mx.float32)
        assert mx.isfinite(rows).all().item()
        lost = mx.square(rows - x.astype(mx.float32)).sum() / mx.square(x.astype(mx.float32)).sum()
        assert lost.item() < 0.011
