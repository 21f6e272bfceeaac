import mlx.core as mx
import numpy as np
import pytest

from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.preconditioners import (
    HadamardPreconditioner,
    JLSketchPreconditioner,
    PreconditionerFactory,
    QJLEncoder,
    RotationPreconditioner,
)


@pytest.mark.parametrize(
    ("kind", "d"), [("rotation", 80), ("rotation", 20), ("hadamard", 64), ("hadamard", 96)]
)
def test_rotations_keep_products_and_come_back(kind: str, d: int) -> None:
    made = PreconditionerFactory.create(kind, d, d, seed=3)
    x = mx.random.normal((7, d), key=mx.random.key(0)).astype(mx.float16)
    y = made.apply(x)
    x = x.astype(mx.float32)
    assert mx.allclose(y @ y.T, x @ x.T, rtol=1e-4, atol=1e-3)
    assert mx.allclose(made.apply_inverse(y), x, atol=1e-5)
    assert mx.array_equal(y, PreconditionerFactory.create(kind, d, d, seed=3).apply(x))
    assert not mx.allclose(y, PreconditionerFactory.create(kind, d, d, seed=4).apply(x), atol=0.1)


@pytest.mark.parametrize("d", [72, 80, 100, 112])
def test_hadamard_refuses_sizes_without_a_symmetric_matrix(d: int) -> None:
    with pytest.raises(QuantizerConfigError, match="rotation"):
        PreconditionerFactory.create("hadamard", d, d)


def test_factory_refuses_what_it_does_not_know() -> None:
    with pytest.raises(KeyError, match="registered"):
        PreconditionerFactory.create("fourier", 8, 8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(QuantizerConfigError):
        PreconditionerFactory.create("jl", 8, 0)


def test_sketch_keeps_norms_on_average() -> None:
    d, m = 32, 64
    x = np.random.default_rng(0).standard_normal((1, d)).astype(np.float32)
    sums = [
        float(mx.square(PreconditionerFactory.create("jl", d, m, seed=s).apply(x)).sum()) / m
        for s in range(300)
    ]
    assert np.mean(sums) == pytest.approx(float(np.square(x).sum()), rel=0.03)


def test_sketch_has_documented_sizes() -> None:
    made = JLSketchPreconditioner(np.ones((3, 5)))
    assert (made.d, made.m) == (5, 3)
    assert made.apply_inverse(made.apply(mx.ones((2, 5)))).shape == (2, 5)
    assert RotationPreconditioner(np.eye(4)).dim == 4
    assert HadamardPreconditioner(np.ones(4)).dim == 4


def test_sign_encoder_matches_the_worked_example() -> None:
    encoder = QJLEncoder(np.array([[1, 2, 0, -1], [0, -1, 1, 1]]))
    signs, norm = encoder.encode_key(np.array([[1.0, 0, 2, 0], [0, 0, 0, 0]]))
    assert signs.tolist() == [[1, 1], [1, 1]]
    assert signs.dtype == mx.int8
    estimate = encoder.estimate_ip(np.array([0.5, 1, 0, 1]), signs, norm)
    assert estimate.tolist() == pytest.approx([2.1019, 0], abs=1e-3)
