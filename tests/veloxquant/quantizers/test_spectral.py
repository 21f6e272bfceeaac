"""Codes in an eigenbasis: what concentrated vectors gain, and that others lose nothing."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.quantizers.codebook import CodebookCodec
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.rotation import Matrix
from veloxquant.quantizers.specs.codebook import CodebookSpec
from veloxquant.quantizers.specs.spectral import SpectralSpec, segments
from veloxquant.quantizers.spectral import Eigenbasis, SpectralCodec, eigenbasis, pays

D = 128


def gaussian(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def rank_four(n: int, dim: int = D, heads: int = 1) -> mx.array:
    """Rows in four directions and a little noise, other directions for every head."""
    basis, weights = gaussian(1, heads, 4, dim, seed=1), gaussian(1, heads, n, 4, seed=2)
    return weights @ basis + 0.05 * gaussian(1, heads, n, dim, seed=3)


def found(x: mx.array) -> Eigenbasis:
    return Eigenbasis(*(mx.array(a) for a in eigenbasis(x[0])))


def lost(codec, x: mx.array) -> float:
    decoded = codec.decode(codec.encode(x), mx.float32)
    return (mx.square(decoded - x).sum() / mx.square(x).sum()).item()


def values_spec(bits: int, leading: int, dim: int = D) -> SpectralSpec:
    return SpectralSpec(segments(dim, bits, leading, 6), 0, 42, unbiased=False)


def flat(bits: int) -> CodebookCodec:
    return codec_for(CodebookSpec(bits, 42, False, "flat"), D)


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("bits", [1, 2, 3, 6])
@pytest.mark.parametrize("leading", [0, 4, 50])
def test_segments_take_the_bytes_of_one_width(dim: int, bits: int, leading: int) -> None:
    spec = values_spec(bits, leading, dim)
    assert sum(n for n, _ in spec.segments) == dim
    assert spec.nbytes(256, dim, 2) == CodebookSpec(bits, 0, False).nbytes(256, dim, 2)


def test_bases_are_orthonormal_sorted_and_canonical() -> None:
    vectors, variances = eigenbasis(rank_four(500, heads=3)[0])
    assert np.abs(vectors.swapaxes(-1, -2) @ vectors - np.eye(D)).max() < 1e-5
    assert (np.diff(variances) <= 0).all()
    assert variances.sum(-1) == pytest.approx(1, abs=1e-4)
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(-2)[..., None, :], -2)
    assert (largest > 0).all()


def test_concentrated_vectors_gain() -> None:
    x = rank_four(2_000)
    plain, bare = lost(flat(2), x), lost(SpectralCodec(D, values_spec(2, 4), found(x)), x)
    assert bare <= 0.4 * plain
    keys = SpectralSpec(((32, 2), (64, 2), (32, 1)), 32, 42, unbiased=True)
    assert lost(SpectralCodec(D, keys, found(x)), x) <= 0.7 * plain


def test_isotropic_vectors_lose_nothing_where_bits_stay_even() -> None:
    x = gaussian(1, 1, 4_000, D)
    basis = found(x)
    assert not pays(np.array(basis.variances), segments(D, 2, 4, 6), 2)
    assert lost(SpectralCodec(D, values_spec(2, 0), basis), x) <= 1.1 * lost(flat(2), x)
    assert pays(np.array(found(rank_four(500)).variances), segments(D, 2, 4, 6), 2)


def test_even_bits_in_a_rotation_are_turboquant_mse() -> None:
    x = gaussian(1, 2, 50, D)
    rotation = codec_for(CodebookSpec(2, 7, True, "flat"), D).rotation
    same = CodebookCodec(D, CodebookSpec(2, 7, True, "flat"), Matrix(rotation.matrix)).encode(x)
    spec = SpectralSpec(((D, 2),), 0, 7, unbiased=True)
    given = Eigenbasis(rotation.matrix.T, mx.full((D,), 1 / D))
    ours = SpectralCodec(D, spec, given).encode(x)
    assert mx.array_equal(ours["c0"], same["w"]).item()
    assert mx.allclose(ours["n"] / D**0.5, same["n"] / D**0.5, rtol=1e-4).item()


def test_the_sketch_makes_the_signal_block_unbiased() -> None:
    x = gaussian(1, 1, 1, 64, seed=4)
    x, q = x / mx.linalg.norm(x), gaussian(1, 1, 1, 64, seed=5) + 2 * x
    got = []
    for seed in range(120):
        codec = SpectralCodec(64, SpectralSpec(((32, 1), (32, 1)), 32, seed, unbiased=True))
        packed = codec.encode(x)
        z = codec.basis.rotate(x)[..., :32]
        head = codec.basis.rotate_query(q)[..., :32]
        coded = codec.basis.rotate_query(
            codec.decode(packed, mx.float32) - codec.signs.decode(packed["z"], packed["g"])
        )[..., :32]
        sketched = codec.signs.scores(q, packed["z"], packed["g"]).item()
        got.append(sketched - ((z - coded) * head).sum().item())
    assert abs(np.mean(got)) <= 3.5 * np.std(got, ddof=1) / len(got) ** 0.5


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("signs", [0, 32])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_products_equal_those_of_the_decoded_rows(bits: int, signs: int, heads: int) -> None:
    x = rank_four(60, 96, heads)
    spec = SpectralSpec(segments(96, bits, 4, 6), signs, 42, unbiased=not signs)
    codec = SpectralCodec(96, spec, found(x))
    q = gaussian(1, heads, 3, 96, seed=1)
    w = mx.softmax(gaussian(1, heads, 3, 60, seed=2), axis=-1)
    packed = codec.encode(x)
    decoded = codec.decode(packed, mx.float32)
    assert mx.allclose(codec.scores(q, packed), q @ decoded.swapaxes(-1, -2), atol=5e-3).item()
    assert mx.allclose(codec.mix(w, packed), w @ decoded, atol=1e-3).item()
    assert sum(a.nbytes for a in packed.values()) == heads * codec.spec.nbytes(60, 96, 4)
    assert not codec.decode(codec.encode(mx.zeros_like(x)), mx.float32).any().item()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_keys_unlike_the_calibration_do_not_grow(bits: int) -> None:
    basis = found(rank_four(600))
    spec = SpectralSpec(segments(D, bits, 4, 6), 0, 42, unbiased=True)
    codec = SpectralCodec(D, spec, basis)
    strange = mx.concatenate([basis.vectors[0].T, gaussian(200, D)])[None, None]
    decoded = codec.decode(codec.encode(strange), mx.float32)
    grown = mx.linalg.norm(decoded, axis=-1) / mx.linalg.norm(strange, axis=-1)
    assert grown.max().item() <= 2.001
