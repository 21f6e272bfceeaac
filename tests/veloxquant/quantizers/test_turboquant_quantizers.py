import mlx.core as mx
import numpy as np
import pytest

from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.composite import CompositeQuantizer
from veloxquant.quantizers.polarquant import PolarQuantizer
from veloxquant.quantizers.qjl import QJLQuantizer
from veloxquant.quantizers.turboquant_mse import TurboQuantMSE
from veloxquant.quantizers.turboquant_prod import TurboQuantProd, TurboQuantProdAdaptive
from veloxquant.quantizers.turboquant_rvq import TurboQuantRVQ

D = 128


def units(n: int, seed: int = 0, d: int = D) -> np.ndarray:
    x = np.random.default_rng(1000 + seed).standard_normal((n, d))  # not the seeds of sketches
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def loss(quantizer, x: np.ndarray) -> float:
    back = np.array(quantizer.decode(quantizer.encode(x)))
    return float((np.square(back - x).sum(1) / np.square(x).sum(1)).mean())


@pytest.mark.parametrize(("b", "error"), [(1, 0.3634), (2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_mse_has_the_known_error(b: int, error: float) -> None:
    x = units(400)
    assert loss(TurboQuantMSE(D, b), x) == pytest.approx(error, rel=0.04)
    assert loss(TurboQuantMSE(D, b, use_beta=True), x) == pytest.approx(error, rel=0.04)


def test_mse_works_on_one_hot_vectors() -> None:
    x = np.eye(D, dtype=np.float32)
    assert loss(TurboQuantMSE(D, 2), x) == pytest.approx(0.1175, rel=0.08)
    assert loss(TurboQuantMSE(D, 2, use_hadamard=True), units(200)) < 0.13


@pytest.mark.parametrize(("b", "error"), [(1, 0.1299), (2, 0.0190)])
def test_two_stages_have_the_error_of_a_shared_residual_table(b: int, error: float) -> None:
    x = units(300)
    made = TurboQuantRVQ(D, b)
    assert loss(made, x) == pytest.approx(error, rel=0.06)
    assert loss(made, x) < loss(TurboQuantMSE(D, b), x) / 2
    worse = TurboQuantRVQ(D, b, residual_scale=2.0)
    assert loss(worse, x) > loss(made, x)


@pytest.mark.parametrize("d", [64, 80])
def test_packed_streams_decode_like_indices(d: int) -> None:
    made, x = TurboQuantRVQ(d, 2), units(6, d=d)
    (first, second), norms = made.encode_pack(x)
    assert first.dtype == mx.uint32
    whole = made.decode(made.encode(x))
    assert mx.allclose(made.decode_packed(first, second, norms), whole, atol=1e-6)
    stacked = [mx.pad(a[None], [(0, 0), (0, 4)] + [(0, 0)] * (a.ndim - 1))
               for a in (first, second, norms)]  # fmt: skip
    assert mx.allclose(made.decode_packed(*stacked, seq_len=6)[0], whole, atol=1e-6)
    assert not made.supports_fused_decode


@pytest.mark.parametrize(("b", "spread"), [(1, 1.54), (2, 0.569), (3, 0.180), (4, 0.052)])
def test_products_are_unbiased_with_the_known_spread(b: int, spread: float) -> None:
    q, x = units(150, 1), units(150, 2)
    truth, found = [], []
    for seed in range(10):
        made = TurboQuantProd(D, b, seed=seed)
        found.append(q @ np.array(made.decode(made.encode(x))).T)
        truth.append(q @ x.T)
    truth, found = np.concatenate(truth), np.concatenate(found)
    error = found - truth
    assert D * np.square(error).mean() == pytest.approx(spread, rel=0.12)
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(1500)
    slope = (found * truth).sum() / np.square(truth).sum()
    assert slope == pytest.approx(1, abs=0.03)


def test_one_bit_is_a_plain_sketch() -> None:
    made, x = TurboQuantProd(D, 1), units(5)
    ev = made.encode(x)
    assert ev.indices is None
    assert mx.allclose(ev.residual_norm, mx.ones(5), atol=1e-3)


def test_decoded_products_equal_estimates() -> None:
    x, q = units(20), units(1, 3)[0]
    for made in (TurboQuantProd(D, 3), TurboQuantMSE(D, 3), TurboQuantRVQ(D, 2), PolarQuantizer(D),
                 QJLQuantizer(D)):  # fmt: skip
        ev = made.encode(x)
        exact = np.array(made.decode(ev)) @ q
        assert np.allclose(np.array(made.estimate_inner_product(q, ev)), exact, atol=1e-4)


def test_adaptive_table_helps_and_old_vectors_stay_readable() -> None:
    rng = np.random.default_rng(0)
    # coordinates of a one-hot under one Hadamard round are all equal: far from Gaussian
    x = np.eye(D, dtype=np.float32)[rng.integers(0, D, 200)]
    made = TurboQuantProdAdaptive(D, b=3, n_calib=100, use_hadamard=True)
    fixed = TurboQuantProd(D, b=3, use_hadamard=True)
    first = made.encode(x[:100])
    before = np.array(made.decode(first))
    later = made.encode(x[100:])
    assert np.array_equal(np.array(made.decode(first)), before)
    assert (
        np.array(later.residual_norm).mean()
        < 0.5 * np.array(fixed.encode(x[100:]).residual_norm).mean()
    )


def test_sketch_size_has_a_default_and_a_limit() -> None:
    assert TurboQuantProd.m_default(96, 3) == 96
    assert TurboQuantProd(96, 3, m=32).encode(units(2, d=96)).signs.shape == (2, 32)
    with pytest.raises(QuantizerConfigError):
        TurboQuantProd(D, m=0)


@pytest.mark.parametrize(("b", "error"), [(2, 0.0353), (3, 0.0095), (4, 0.0025)])
def test_polar_has_the_known_error(b: int, error: float) -> None:
    x = units(300)
    made = PolarQuantizer(D, b, n_levels=7)
    assert loss(made, x) == pytest.approx(error, rel=0.06)
    ev = made.encode(x)
    assert ev.final_radius.shape == (300,)
    assert [a.shape[1] for a in ev.angles] == [64, 32, 16, 8, 4, 2, 1]
    norm = np.linalg.norm(np.array(made.decode(ev)), axis=1)
    assert np.allclose(norm, np.array(ev.final_radius), rtol=1e-3)


def test_polar_stops_at_the_level_asked_for() -> None:
    made = PolarQuantizer(D, 2)
    ev = made.encode(units(3))
    assert ev.final_radius.shape == (3, 8)
    assert loss(made, units(300)) == pytest.approx(0.032, rel=0.08)


def test_composite_puts_channels_back() -> None:
    x = units(50)
    x[:, [3, 90]] *= 40
    outliers = np.array([90, 3])
    made = CompositeQuantizer(TurboQuantMSE(2, 8), TurboQuantMSE(D - 2, 2), outliers, D)
    ev = made.encode(mx.array(x).astype(mx.bfloat16))
    back = np.array(made.decode(ev).astype(mx.float32))
    assert np.abs(back[:, [3, 90]] - x[:, [3, 90]]).max() < 0.3
    assert loss(made, x) < loss(TurboQuantMSE(D, 2), x) / 5
    q = units(1, 5)[0]
    exact = np.array(made.decode(made.encode(x))) @ q
    found = np.array(made.estimate_inner_product(q, made.encode(x)))
    assert np.allclose(found, exact, atol=1e-3)
    parts = ev.outlier_encoded.memory_bytes() + ev.inlier_encoded.memory_bytes()
    assert ev.memory_bytes() == parts + ev.outlier_idx.nbytes


@pytest.mark.parametrize("bad", [[], [0, 0], [-1], [128], [0.5], list(range(128))])
def test_composite_refuses_other_channels(bad: list[float]) -> None:
    with pytest.raises(QuantizerConfigError):
        CompositeQuantizer(TurboQuantMSE(2), TurboQuantMSE(126), np.array(bad), D)


def test_composite_refuses_quantizers_of_other_sizes() -> None:
    with pytest.raises(QuantizerConfigError, match="inlier_quantizer"):
        CompositeQuantizer(TurboQuantMSE(2), TurboQuantMSE(D), np.array([1, 2]), D)
