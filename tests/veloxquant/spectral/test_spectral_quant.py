import itertools

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.spectral import eigenbasis as stacked_eigenbasis
from veloxquant.quantizers.turboquant_mse import TurboQuantMSE
from veloxquant.spectral.spectral_quant import SpectralQuantizer

D = 64


def low_rank(n: int = 2000, rank: int = 4, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    basis = np.random.default_rng(99).standard_normal((rank, D)) / np.sqrt(D)
    return rng.standard_normal((n, rank)) @ basis + 0.05 / np.sqrt(D) * rng.standard_normal((n, D))


def eigenbasis(x: np.ndarray) -> np.ndarray:
    """Directions in columns."""
    return np.array(stacked_eigenbasis(mx.array(x.astype(np.float32))[None])[0][0])


def loss(quantizer, x: np.ndarray) -> float:
    x = x.astype(np.float32)
    back = np.array(quantizer.decode(quantizer.encode(x)))
    return float((np.square(back - x).sum(1) / np.square(x).sum(1)).mean())


def test_the_basis_lowers_the_error_on_few_directions() -> None:
    x = low_rank()
    basis = eigenbasis(x[:1500])
    test = x[1500:]
    fitted = SpectralQuantizer(D, 3, 2, basis)
    assert loss(fitted, test) < 0.45 * loss(TurboQuantMSE(D, 2), test)
    isotropic = np.random.default_rng(2).standard_normal((300, D))
    plain = SpectralQuantizer(D, 2, 2, eigenbasis(isotropic))
    assert loss(plain, isotropic) == pytest.approx(loss(TurboQuantMSE(D, 2), isotropic), rel=0.1)


def test_error_falls_with_bits() -> None:
    x = low_rank()
    basis = eigenbasis(x)
    losses = [loss(SpectralQuantizer(D, b, b, basis), x) for b in (1, 2, 3, 4)]
    assert all(b < 0.5 * a for a, b in itertools.pairwise(losses))


def test_products_agree_and_the_sketch_takes_the_bias_away() -> None:
    x, q = low_rank(200).astype(np.float32), low_rank(1, seed=5)[0].astype(np.float32)
    basis = eigenbasis(x)
    made = SpectralQuantizer(D, 2, 2, basis)
    ev = made.encode(x)
    assert np.allclose(made.estimate_inner_product(q, ev), np.array(made.decode(ev)) @ q, atol=1e-4)
    truth = x @ q
    biased = np.array(made.estimate_inner_product(q, ev))
    sketches = (SpectralQuantizer(D, 2, 2, basis, apply_qjl=True, seed=i) for i in range(60))
    sketched = np.mean([np.array(s.estimate_inner_product(q, s.encode(x))) for s in sketches], 0)
    assert np.abs(sketched - truth).mean() < 0.5 * np.abs(biased - truth).mean()


def test_zero_vectors_ratio_and_limits() -> None:
    made = SpectralQuantizer(D, apply_qjl=True)
    ev = made.encode(mx.zeros((2, D), dtype=mx.float16))
    assert mx.abs(made.decode(ev)).max() == 0
    assert made.compression_ratio() == pytest.approx(2 * 2 * D / ev.memory_bytes())
    for bad in ({"d_s": 0}, {"d_s": D}, {"b_signal": 0}, {"jl_dim": 0, "apply_qjl": True}):
        with pytest.raises(QuantizerConfigError):
            SpectralQuantizer(D, **bad)
    with pytest.raises(QuantizerConfigError, match="rotation"):
        SpectralQuantizer(D, rotation=np.eye(3))
