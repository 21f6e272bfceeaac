"""Polar angles: published error, norms kept by construction, laws of the angles."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.math.distributions import polar_angle_pdf
from veloxquant.math.polar_tree import angle_density, angle_levels, tree
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.polar import PolarSpec


def gaussian(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize("dim", [2, 6, 64, 80, 96, 112, 128, 192, 256])
def test_a_tree_has_a_node_for_every_coordinate_but_one(dim: int) -> None:
    levels = tree(dim)
    assert sum(len(level.sizes) for level in levels) == dim - 1
    assert sum(levels[-1].sizes[0]) == dim
    assert len(levels[-1].sizes) == 1


def test_levels_are_those_of_the_paper() -> None:
    wanted = {
        2: (0.310, 0.634, 0.937, 1.261), 3: (0.426, 0.674, 0.896, 1.145),
        4: (0.524, 0.706, 0.865, 1.047), 7: (0.691, 0.757, 0.814, 0.880),
    }  # fmt: skip
    for level, values in wanted.items():
        side = 2 ** (level - 1)
        assert angle_levels(side, side, 2) == pytest.approx(values, abs=6e-4)


@pytest.mark.parametrize("level", [2, 3, 5])
def test_the_density_of_equal_sides_is_the_published_one(level: int) -> None:
    t = np.linspace(0.05, 1.5, 50)
    side = 2 ** (level - 1)
    ratio = angle_density(t, side, side) / polar_angle_pdf(t, level)
    assert ratio.max() / ratio.min() == pytest.approx(1, abs=1e-6)


def test_angles_of_rotated_vectors_follow_their_law() -> None:
    codec = codec_for(PolarSpec(2, 1, unbiased=False), 64)
    x = gaussian(1, 1, 2_000, 64)
    y = np.abs(np.array(codec.rotation.rotate(x / mx.linalg.norm(x, axis=-1, keepdims=True))[0, 0]))
    for side in (1, 2, 4, 8):
        half = y.shape[-1] // 2
        angles = np.sort(np.arctan2(y[:, half:], y[:, :half]).ravel())
        grid = np.linspace(0, np.pi / 2, 4_001)
        law = np.cumsum(angle_density(grid, side, side))
        measured = np.searchsorted(angles, grid) / len(angles)
        assert np.abs(measured - law / law[-1]).max() < 0.02
        y = np.hypot(y[:, :half], y[:, half:])


@pytest.mark.parametrize(("bits", "error"), [(2, 0.0353), (3, 0.0095), (4, 0.0025)])
def test_values_have_the_published_error(bits: int, error: float) -> None:
    codec, x = codec_for(PolarSpec(bits, 42, unbiased=False), 128), gaussian(1, 1, 2_000, 128)
    lost = mx.square(codec.decode(codec.encode(x), mx.float32) - x).sum() / mx.square(x).sum()
    assert lost.item() == pytest.approx(error, rel=0.05)


def test_error_falls_with_every_bit() -> None:
    x, errors = gaussian(1, 1, 300, 128), []
    for bits in range(1, 7):
        codec = codec_for(PolarSpec(bits, 42, unbiased=False), 128)
        errors.append(mx.square(codec.decode(codec.encode(x), mx.float32) - x).mean().item())
    assert all(b < 0.4 * a for a, b in itertools.pairwise(errors))


@pytest.mark.parametrize("bits", [1, 2, 4, 5])
@pytest.mark.parametrize("dim", [2, 64, 80, 128])
def test_products_and_norms_are_those_of_the_decoded_rows(bits: int, dim: int) -> None:
    codec = codec_for(PolarSpec(bits, 2, unbiased=True), dim)
    x, q = gaussian(2, 2, 30, dim), gaussian(2, 2, 3, dim, seed=1)
    w = mx.softmax(gaussian(2, 2, 3, 30, seed=2), axis=-1)
    packed = codec.encode(x)
    decoded = codec.decode(packed, mx.float32)
    assert mx.allclose(codec.scores(q, packed), q @ decoded.swapaxes(-1, -2), atol=1e-3).item()
    assert mx.allclose(codec.mix(w, packed), w @ decoded, atol=1e-3).item()
    norms = mx.linalg.norm(decoded, axis=-1, keepdims=True)
    assert mx.allclose(norms, packed["r"], rtol=1e-3).item()
    assert sum(a.nbytes for a in packed.values()) == 4 * codec.spec.nbytes(30, dim, 4)


def test_keys_are_unbiased() -> None:
    codec = codec_for(PolarSpec(2, 42, unbiased=True), 128)
    x, q = gaussian(1, 1, 3_000, 128), gaussian(1, 1, 16, 128, seed=1)
    true, got = q @ x.swapaxes(-1, -2), codec.scores(q, codec.encode(x))
    assert ((true * got).sum() / mx.square(true).sum()).item() == pytest.approx(1, abs=0.01)


def test_codes_know_no_length_and_zero_stays_zero() -> None:
    codec, x = codec_for(PolarSpec(2, 42, unbiased=True), 128), gaussian(1, 1, 40, 128)
    packed, large = codec.encode(x), codec.encode(2.0**12 * x)
    assert mx.array_equal(packed["w"], large["w"]).item()
    assert mx.allclose(packed["r"] * 2.0**12, large["r"]).item()
    assert not codec.decode(codec.encode(mx.zeros_like(x)), mx.float32).any().item()
    lone = codec.decode(codec.encode(mx.eye(128)[None, None]), mx.float32)
    assert mx.square(lone - mx.eye(128)).sum(-1).mean().item() < 0.06
