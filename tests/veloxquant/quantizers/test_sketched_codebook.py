"""Codes with a sketch of the rest: unbiased, and how far off."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.sketch import SketchCodec
from veloxquant.quantizers.specs.sketch import SketchedCodebookSpec, SketchSpec

D = 128


def gaussian(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def unit(*shape: int, seed: int = 0) -> mx.array:
    x = gaussian(*shape, seed=seed)
    return x / mx.linalg.norm(x, axis=-1, keepdims=True)


def error(bits: int, rows: int | None = None, seed: int = 3) -> float:
    """D times the mean squared error of products of unit vectors."""
    codec = codec_for(SketchedCodebookSpec(bits, rows, seed), D)
    q, x = unit(1, 1, 60, D, seed=1), unit(1, 1, 2_000, D, seed=2)
    lost = codec.scores(q, codec.encode(x)) - q @ x.swapaxes(-1, -2)
    return D * mx.square(lost).mean().item()


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_products_are_unbiased(bits: int) -> None:
    codec = codec_for(SketchedCodebookSpec(bits, 4 * D, 5), D)
    q, x = unit(1, 1, 60, D, seed=1), unit(1, 1, 2_000, D, seed=2)
    true, got = q @ x.swapaxes(-1, -2), codec.scores(q, codec.encode(x))
    slope = (true * got).sum() / mx.square(true).sum()
    assert slope.item() == pytest.approx(1, abs=0.01)


def test_one_product_is_unbiased_over_seeds() -> None:
    q, x = unit(1, 1, 1, 64, seed=6), unit(1, 1, 1, 64, seed=7)
    q = (q + x) / mx.linalg.norm(q + x)
    codecs = (codec_for(SketchedCodebookSpec(2, 64, s), 64) for s in range(150))
    got = np.array([c.scores(q, c.encode(x)).item() for c in codecs])
    tolerance = 3.5 * got.std(ddof=1) / math.sqrt(len(got))
    assert abs(got.mean() - (q * x).sum().item()) <= tolerance


def test_error_falls_with_bits_and_stays_below_the_bounds() -> None:
    errors = [error(bits) for bits in (1, 2, 3, 4)]
    assert all(b < 0.5 * a for a, b in itertools.pairwise(errors))
    # Independent rows: the paper's figures; orthogonal ones are well below.
    for bits, found, paper in zip((1, 2, 3, 4), errors, (1.57, 0.56, 0.18, 0.047), strict=True):
        assert found < 0.65 * paper
        assert found < math.sqrt(3) * math.pi**2 * 4.0**-bits


def test_four_times_the_signs_quarter_the_variance() -> None:
    assert error(2) / error(2, 4 * D) == pytest.approx(4, rel=0.15)


def test_one_bit_is_the_sketch_alone() -> None:
    plain: SketchCodec = codec_for(SketchSpec(None, 9), D)
    codec = codec_for(SketchedCodebookSpec(1, None, 9), D)
    x, q = gaussian(1, 2, 40, D), gaussian(1, 2, 3, D, seed=1)
    packed, other = codec.encode(x), plain.encode(x)
    assert mx.array_equal(packed["z"], other["z"]).item()
    assert mx.array_equal(codec.scores(q, packed), plain.scores(q, other)).item()


@pytest.mark.parametrize("bits", [1, 2, 3, 6])
@pytest.mark.parametrize(("dim", "rows"), [(64, None), (80, 96), (128, 64)])
def test_products_equal_those_of_the_decoded_rows(bits: int, dim: int, rows: int | None) -> None:
    codec = codec_for(SketchedCodebookSpec(bits, rows, 2), dim)
    x, q = gaussian(2, 2, 30, dim), gaussian(2, 2, 3, dim, seed=1)
    w = mx.softmax(gaussian(2, 2, 3, 30, seed=2), axis=-1)
    packed = codec.encode(x)
    decoded = codec.decode(packed, mx.float32)
    assert mx.allclose(codec.scores(q, packed), q @ decoded.swapaxes(-1, -2), atol=2e-3).item()
    assert mx.allclose(codec.mix(w, packed), w @ decoded, atol=1e-3).item()
    assert sum(a.nbytes for a in packed.values()) == 4 * codec.spec.nbytes(30, dim, 4)
    assert not codec.scores(q, codec.encode(mx.zeros_like(x))).any().item()
