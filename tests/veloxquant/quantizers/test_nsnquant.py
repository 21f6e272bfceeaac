"""Normalise, shift, normalise; the universal codebook; the documented functions."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.quantizers.nsn import NSNCodec
from veloxquant.quantizers.nsnquant import (
    build_universal_codebook,
    hadamard_forward,
    hadamard_inverse,
    nsn_inverse,
    nsn_transform,
    vq_decode,
    vq_encode,
)
from veloxquant.quantizers.specs.vector import NSNSpec

BOOKS = {1: build_universal_codebook(), 2: build_universal_codebook(kind="magnitude")}


def biased(seed: int = 0, tokens: int = 512, dim: int = 128) -> mx.array:
    """Channel bias on one channel in twelve, and token scales that differ."""
    draws = mx.random.split(mx.random.key(seed), 3)
    shift = mx.where(mx.arange(dim) % 12 == 0, 8.0, 0.0)
    x = mx.random.normal((1, 1, tokens, dim), key=draws[0]) + shift
    return x * mx.exp(mx.random.normal((1, 1, tokens, 1), key=draws[1]))


def relative(got: mx.array, x: mx.array) -> float:
    each = mx.square(got - x).sum(axis=-1) / mx.square(x).sum(axis=-1)
    return each.mean().item()


def plain(x: mx.array, bits: int) -> mx.array:
    """Token norm, rotation and the same codebook, without the shift."""
    norm = mx.linalg.norm(x, axis=-1, keepdims=True) / x.shape[-1] ** 0.5
    coded = vq_encode(hadamard_forward(x / norm), BOOKS[bits], bits)
    return hadamard_inverse(vq_decode(coded, BOOKS[bits])) * norm


def shifted(x: mx.array, bits: int) -> mx.array:
    codec = NSNCodec(x.shape[-1], NSNSpec(bits, 64, 8, 1234))
    return codec.decode(codec.encode(x), mx.float32)


@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e4])
def test_the_transform_is_undone(factor: float) -> None:
    x = factor * biased(tokens=64)
    z, s1, o, s2 = nsn_transform(x)
    assert (s1.dtype, s2.dtype, z.dtype) == (mx.float16, mx.float16, mx.float32)
    assert s1.shape == s2.shape == (1, 1, 64, 1)
    assert o.shape == (1, 1, 1, 128)
    # A thousandth is a denormal fp16 scale; the inverse does not mind.
    back = nsn_inverse(z, s1, o, s2)
    assert mx.abs(back - x).max().item() <= 1e-5 * mx.abs(x).max().item()
    if factor == 1:
        assert mx.abs(mx.linalg.norm(z, axis=-1) - 128**0.5).max().item() < 1e-2
        assert mx.abs(z.mean(axis=-2)).mean().item() < 0.05


def test_codebooks() -> None:
    for kind, bits, error in (("signed", 1, 0.326), ("magnitude", 2, 0.0968)):
        book = BOOKS[bits]
        assert book.shape == (256, 8)
        assert book.dtype == np.float32
        x = mx.random.normal((2000, 8), key=mx.random.key(5))
        rows = mx.abs(x) if bits == 2 else x
        away = mx.square(rows[:, None] - mx.array(book)[None]).sum(axis=-1)
        assert away.min(axis=1).mean().item() / 8 == pytest.approx(error, rel=0.04)
        small = build_universal_codebook(16, 4, 7, 4096, 5, kind)
        assert np.array_equal(small, build_universal_codebook(16, 4, 7, 4096, 5, kind))
        assert not np.array_equal(small, build_universal_codebook(16, 4, 8, 4096, 5, kind))
    with pytest.raises(ValueError, match="codebook_size=512"):
        build_universal_codebook(512)
    with pytest.raises(ValueError, match="kind='other'"):
        build_universal_codebook(kind="other")  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_codes_of_tokens(dim: int) -> None:
    x = hadamard_forward(mx.random.normal((2, 3, 10, dim), key=mx.random.key(1)))
    for bits in (1, 2):
        coded = vq_encode(x, BOOKS[bits], bits)
        assert coded["idx"].dtype == mx.uint8
        assert coded["idx"].shape == (2, 3, 10, dim // 8)
        assert (coded["signs"] is None) == (bits == 1)
        back = vq_decode(coded, BOOKS[bits])
        assert back.shape == x.shape
        assert mx.abs(mx.linalg.norm(back, axis=-1) - dim**0.5).max().item() < 1e-3
    assert (
        mx.abs(hadamard_inverse(x) - hadamard_inverse(hadamard_forward(hadamard_inverse(x))))
        .max()
        .item()
        < 1e-4
    )
    with pytest.raises(ValueError, match="bits=3"):
        vq_encode(x, BOOKS[1], 3)


@pytest.mark.parametrize(("bits", "measured"), [(1, 0.062), (2, 0.018)])
def test_bias_of_channels_costs_little(bits: int, measured: float) -> None:
    x = biased()
    lost = relative(shifted(x, bits), x)
    assert lost <= 0.25 * relative(plain(x, bits), x)
    assert lost <= 1.2 * measured


@pytest.mark.parametrize("bits", [1, 2])
def test_data_without_bias_lose_nothing_by_the_shift(bits: int) -> None:
    x = mx.random.normal((1, 1, 512, 128), key=mx.random.key(2))
    assert relative(shifted(x, bits), x) <= 1.03 * relative(plain(x, bits), x)


def test_the_scale_of_a_token_leaves_all_codes_alone() -> None:
    x = biased(3, tokens=64)
    factor = mx.where(mx.arange(64) % 3 == 0, 8.0, 0.25)[:, None]
    codec = NSNCodec(128, NSNSpec(2, 64, 8, 1234))
    a, b = codec.encode(x), codec.encode(x * factor)
    for name in ("w", "g", "m"):
        assert mx.array_equal(a[name], b[name]).item(), name
    assert mx.allclose(a["a"] * factor, b["a"]).item()


def test_constant_rows_come_back() -> None:
    x = mx.broadcast_to(mx.random.normal((1, 1, 1, 64), key=mx.random.key(4)), (1, 1, 64, 64))
    codec = NSNCodec(64, NSNSpec(2, 64, 8, 1234))
    assert mx.abs(codec.decode(codec.encode(x), mx.float32) - x).max().item() < 1e-4


@pytest.mark.parametrize("bits", [1, 2])
def test_products_are_those_with_the_decoded_rows(bits: int) -> None:
    codec = NSNCodec(64, NSNSpec(bits, 32, 8, 1234))
    packed = codec.encode(biased(5, tokens=96, dim=64))
    rows = codec.decode(packed, mx.float32)
    q = mx.random.normal((1, 1, 3, 64), key=mx.random.key(6))
    w = mx.random.normal((1, 1, 3, 96), key=mx.random.key(7))
    scale = mx.abs(rows).max().item()
    got = codec.scores(q, packed)
    assert mx.abs(got - q @ rows.swapaxes(-1, -2)).max().item() < 1e-4 * scale
    assert mx.abs(codec.mix(w, packed) - w @ rows).max().item() < 1e-4 * scale
    assert sum(a.nbytes for a in packed.values()) == codec.spec.nbytes(96, 64, 4)
