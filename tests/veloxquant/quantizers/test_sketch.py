"""Sign sketches: unbiased products, their variance, what they need of a key."""

import math

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.math.rotation import make_jl_matrix
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.sketch import GaussianSketch, SketchCodec, sketch
from veloxquant.quantizers.specs.sketch import SketchSpec

D = 128


def gaussian(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def unit(*shape: int, seed: int = 0) -> mx.array:
    x = gaussian(*shape, seed=seed)
    return x / mx.linalg.norm(x, axis=-1, keepdims=True)


def iid(rows: int, seed: int = 1) -> SketchCodec:
    given = GaussianSketch(make_jl_matrix(D, rows, seed))
    return SketchCodec(D, SketchSpec(rows, seed), given)


def estimates(codec: SketchCodec, q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
    """True and estimated products of all queries with all keys."""
    return q @ k.swapaxes(-1, -2), codec.scores(q, codec.encode(k))


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("rows", [40, 128, 200])
def test_rows_are_orthogonal_in_blocks(dim: int, rows: int) -> None:
    s = sketch(dim, rows, 3)
    for start in range(0, rows, dim):
        block = s.matrix[start : start + dim]
        assert mx.abs(block @ block.T - dim * mx.eye(len(block))).max().item() < 1e-3
    x = gaussian(1, 2, 5, dim)
    assert mx.allclose(s.rotate(x), x @ s.matrix.T, atol=1e-4).item()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_estimates_are_unbiased_with_little_variance(seed: int) -> None:
    codec = codec_for(SketchSpec(None, seed), D)
    true, got = estimates(codec, unit(1, 1, 40, D, seed=4), unit(1, 1, 3_000, D, seed=5))
    slope = ((true * got).sum() / mx.square(true).sum()).item()
    assert slope == pytest.approx(1, abs=0.03)
    assert D * mx.square(got - true).mean().item() <= 0.65


def test_a_key_is_unbiased_over_sketches() -> None:
    k, q = unit(1, 1, 1, D, seed=6), unit(1, 1, 1, D, seed=7)
    q = (q + k) / mx.linalg.norm(q + k)
    got = np.array(
        [codec_for(SketchSpec(64, s), D).scores(q, codec_for(SketchSpec(64, s), D).encode(k)).item()
         for s in range(150)]
    )  # fmt: skip
    error = got.std(ddof=1) / math.sqrt(len(got))
    assert abs(got.mean() - (q * k).sum().item()) <= 3.5 * error


def test_independent_rows_have_the_variance_of_the_paper() -> None:
    true, got = estimates(iid(D), unit(1, 1, 200, D, seed=8), unit(1, 1, 3_000, D, seed=9))
    expected = math.pi / 2 - mx.square(true).mean().item()
    assert D * mx.square(got - true).mean().item() == pytest.approx(expected, rel=0.08)


def test_correlation_with_the_truth_grows_with_the_rows() -> None:
    found = []
    for rows, wanted in ((D, 0.62), (2 * D, 0.77), (4 * D, 0.85)):
        true, got = estimates(iid(rows), unit(1, 1, 60, D, seed=8), unit(1, 1, 2_000, D, seed=9))
        found.append(np.corrcoef(np.array(true).ravel(), np.array(got).ravel())[0, 1])
        assert found[-1] == pytest.approx(wanted, abs=0.03)
    assert found == sorted(found)


@pytest.mark.parametrize("rows", [None, 96, 256, 1_024])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_products_equal_those_of_the_decoded_rows(dim: int, rows: int | None) -> None:
    codec = codec_for(SketchSpec(rows, 2), dim)
    x, q = gaussian(2, 2, 30, dim), gaussian(2, 2, 3, dim, seed=1)
    w = mx.softmax(gaussian(2, 2, 3, 30, seed=2), axis=-1)
    packed = codec.encode(x)
    decoded = codec.decode(packed, mx.float32)
    assert mx.allclose(codec.scores(q, packed), q @ decoded.swapaxes(-1, -2), atol=2e-3).item()
    assert mx.allclose(codec.mix(w, packed), w @ decoded, atol=1e-3).item()
    assert sum(a.nbytes for a in packed.values()) == 4 * codec.spec.nbytes(30, dim, 4)


def test_signs_know_no_length_but_a_direction() -> None:
    codec, k = codec_for(SketchSpec(None, 2), D), gaussian(1, 1, 50, D)
    signs = codec.encode(k)["z"]
    assert mx.array_equal(codec.encode(1e4 * k)["z"], signs).item()
    assert mx.array_equal(codec.encode(-k)["z"], ~signs).item()
    assert not codec.scores(k, codec.encode(mx.zeros_like(k))).any().item()


def test_the_worked_example() -> None:
    s = mx.array([[1.0, 2, 0, -1], [0, -1, 1, 1]])
    codec = SketchCodec(4, SketchSpec(2, 0), GaussianSketch(s))
    packed = codec.encode(mx.array([1.0, 0, 2, 0]).reshape(1, 1, 1, 4))
    assert packed["z"].item() & 3 == 3
    got = codec.scores(mx.array([0.5, 1, 0, 1]).reshape(1, 1, 1, 4), packed)
    assert got.item() == pytest.approx(2.1019, abs=1e-3)
