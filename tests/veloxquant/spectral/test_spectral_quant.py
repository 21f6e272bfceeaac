"""The quantizer of an eigenbasis: error falls with bits, products without bias, zeros stay."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.spectral import eigenbasis
from veloxquant.spectral.spectral_quant import SpectralQuantizer

D = 64


def rank_four(n: int) -> mx.array:
    basis, weights, noise = (
        mx.random.normal(shape, key=mx.random.key(i))
        for i, shape in enumerate(((4, D), (n, 4), (n, D)))
    )
    return weights @ basis + 0.05 * noise


def lost(coder: SpectralQuantizer, x: mx.array) -> float:
    return (mx.square(coder.decode(coder.encode(x)) - x).sum() / mx.square(x).sum()).item()


def columns(x: mx.array) -> np.ndarray:
    return eigenbasis(x[None])[0][0]


def test_error_falls_with_bits_and_with_a_basis() -> None:
    x = rank_four(800)
    errors = [lost(SpectralQuantizer(D, b, b, columns(x)), x) for b in range(1, 6)]
    assert all(b < 0.5 * a for a, b in itertools.pairwise(errors))
    assert errors[2] < lost(SpectralQuantizer(D), x)
    isotropic = mx.random.normal((800, D), key=mx.random.key(9))
    assert lost(SpectralQuantizer(D, d_s=0), isotropic) == pytest.approx(0.034, rel=0.1)


@pytest.mark.parametrize("d_s", [0, 4, D])
def test_products_are_those_of_the_decoded_vectors(d_s: int) -> None:
    x = rank_four(50)
    coder = SpectralQuantizer(D, rotation=columns(x), d_s=d_s)
    encoded, q = coder.encode(x), mx.random.normal((D,), key=mx.random.key(4))
    got = coder.estimate_inner_product(q, encoded)
    assert mx.allclose(got, coder.decode(encoded) @ q, atol=1e-3).item()
    assert encoded.memory_bytes() > 0


@pytest.mark.parametrize("d_s", [4, D])
def test_a_sketch_makes_up_for_what_leading_directions_lose(d_s: int) -> None:
    x, q, lost = rank_four(300), mx.random.normal((D,), key=mx.random.key(4)), []
    for apply_qjl in (False, True):
        coder = SpectralQuantizer(D, 2, 4, columns(x), d_s, apply_qjl, jl_dim=4_096)
        got = coder.estimate_inner_product(q, coder.encode(x))
        lost.append(mx.square(got - x @ q).mean().item())
    assert lost[1] < 0.3 * lost[0]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_zeros_stay_and_types_come_back(dtype: mx.Dtype) -> None:
    coder = SpectralQuantizer(D, apply_qjl=True)
    decoded = coder.decode(coder.encode(mx.zeros((3, D), dtype=dtype)))
    assert decoded.dtype == dtype
    assert not decoded.any().item()
    assert not coder.estimate_inner_product(mx.ones((D,)), coder.encode(mx.zeros((3, D)))).any()


def test_the_ratio_counts_norms_and_signs() -> None:
    assert SpectralQuantizer(128, 3, 2).compression_ratio() == pytest.approx(
        16 * 128 / (4 * 3 + 124 * 2 + 32)
    )
    with_signs = SpectralQuantizer(128, 3, 2, apply_qjl=True)
    assert with_signs.compression_ratio() == pytest.approx(2048 / (292 + 4 + 16))


@pytest.mark.parametrize(
    "fields",
    [{"d_s": D + 1}, {"d_s": -1}, {"jl_dim": 0}, {"b_signal": 0}, {"b_noise": 9},
     {"rotation": np.ones((D, D))}, {"rotation": np.eye(3)}],
    ids=lambda f: next(iter(f)),
)  # fmt: skip
def test_what_cannot_be_is_refused(fields: dict) -> None:
    with pytest.raises((QuantizerConfigError, ValueError)):
        SpectralQuantizer(D, **fields)
