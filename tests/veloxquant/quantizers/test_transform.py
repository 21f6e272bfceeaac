"""Transform coding: the basis, the budget, the published distortions, products from the stream."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.math.shrinkage import future_variances
from veloxquant.quantizers.base import Packed
from veloxquant.quantizers.specs.coded import TransformSpec
from veloxquant.quantizers.transform import TransformCodec

CHOICES = (0, 1, 2, 3, 4, 6, 8)
DISTORTION = np.array([1, 0.363, 0.1188, 0.0374, 0.01154, 0.0035, 0.00104, np.nan, 9.3e-5])
"""Of a unit Gaussian under its best uniform grid, by width."""


def rows_of(spectrum: np.ndarray, tokens: int, seed: int, heads: int = 1) -> mx.array:
    """Gaussian rows with this spectrum in a random basis, off centre."""
    draw = np.random.default_rng(7)
    basis = np.linalg.qr(draw.standard_normal((len(spectrum), len(spectrum))))[0]
    z = np.random.default_rng(seed).standard_normal((1, heads, tokens, len(spectrum)))
    return mx.array((z * np.sqrt(spectrum) @ basis.T + 0.5).astype(np.float32))


def coded(x: mx.array, budget: int, **fields) -> tuple[TransformCodec, Packed]:
    codec = TransformCodec(x.shape[-1], TransformSpec(budget, CHOICES, 3.5, **fields))
    return codec, codec.encode(x)


def lost(codec: TransformCodec, packed: Packed, x: mx.array) -> float:
    fitted = {name: a for name, a in packed.items() if name != "w"}
    again = {**codec.encode_fitted(x, fitted), **fitted}
    return float(mx.square(codec.decode(again, mx.float32) - x).sum(axis=-1).mean().item())


DECAY = np.exp(-np.arange(128) / 12)


@pytest.mark.parametrize("budget", [0, 1, 100, 256, 512, 1024, 2000])
def test_widths_keep_the_budget_and_fall_with_the_variance(budget: int) -> None:
    codec, packed = coded(rows_of(DECAY, 256, 1), budget)
    bits = np.array(packed["bits"])[0, 0, 0]
    assert bits.sum() <= budget
    assert set(bits.tolist()) <= set(CHOICES)
    assert (np.diff(bits.astype(int)) <= 0).all()
    assert packed["w"].shape[-1] == max(1, -(-min(budget, 1024) // 32)) == codec.words
    assert sum(a.nbytes for a in packed.values()) == codec.spec.nbytes(256, 128, 4)


def test_the_basis_is_orthonormal() -> None:
    _, packed = coded(rows_of(DECAY, 256, 1, heads=2), 512)
    basis = np.array(packed["basis"])
    np.testing.assert_allclose(
        basis.swapaxes(-1, -2) @ basis, np.eye(128)[None, None].repeat(2, 1), atol=1e-5
    )


def test_a_full_budget_is_nearly_exact_and_none_leaves_the_mean() -> None:
    x = rows_of(DECAY, 256, 2)
    codec, packed = coded(x, 1024)
    assert lost(codec, packed, x) < 1.2e-4 * DECAY.sum()
    codec, packed = coded(x, 0)
    rows = codec.decode(packed, mx.float32)
    np.testing.assert_allclose(
        np.array(rows), np.array(mx.broadcast_to(x.mean(axis=2, keepdims=True), x.shape)), atol=1e-4
    )


def test_the_error_falls_with_the_budget() -> None:
    x = rows_of(DECAY, 256, 3)
    errors = [lost(*coded(x, budget), x) for budget in (0, 32, 100, 200, 400, 800)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("budget", [128, 256, 512])
def test_distortion_is_that_of_the_grids(budget: int) -> None:
    x = rows_of(DECAY, 256, 4)
    codec, packed = coded(x, budget)
    bits = np.array(packed["bits"])[0, 0, 0]
    centred = np.array(x[0, 0]) - np.array(x[0, 0]).mean(0)
    values = future_variances(np.linalg.eigvalsh(centred.T @ centred / 256)[::-1], 255)
    kept = len(bits)
    wanted = (values[:kept] * DISTORTION[bits]).sum() + values[kept:].sum()
    assert lost(codec, packed, x) == pytest.approx(wanted, rel=0.25)
    assert lost(codec, packed, rows_of(DECAY, 1024, 5)) <= 1.8 * wanted


def test_few_directions_take_the_whole_budget() -> None:
    spectrum = np.where(np.arange(128) < 16, 1.0, 0.05**2 / 128)
    x = rows_of(spectrum, 256, 6)
    codec, packed = coded(x, 128)
    assert np.array(packed["bits"])[0, 0, 0].tolist()[:16] == [8] * 16
    assert lost(codec, packed, x) <= 1e-3 * spectrum.sum()


@pytest.mark.parametrize("budget", [30, 512, 700])
@pytest.mark.parametrize("dim", [64, 80])
def test_products_are_those_of_the_decoded_rows(budget: int, dim: int) -> None:
    x = rows_of(np.exp(-np.arange(dim) / 9), 256, 8, heads=3)
    codec, packed = coded(x, budget)
    rows = codec.decode(packed, mx.float32)
    q = mx.random.normal((1, 3, 5, dim), key=mx.random.key(1))
    w = mx.softmax(mx.random.normal((1, 3, 5, 256), key=mx.random.key(2)), axis=-1)
    for got, wanted in (
        (codec.scores(q, packed), q @ rows.swapaxes(-1, -2)),
        (codec.mix(w, packed), w @ rows),
    ):
        assert mx.abs(got - wanted).max().item() <= 2e-4


def test_rows_without_spread_and_huge_rows() -> None:
    for x in (mx.zeros((1, 2, 256, 64)), mx.full((1, 2, 256, 64), 3.0)):
        codec, packed = coded(x, 256)
        assert mx.abs(codec.decode(packed, mx.float32) - x).max().item() <= 1e-5
    x = rows_of(np.exp(-np.arange(64) / 9), 256, 9) * 1e15
    codec, packed = coded(x, 256)
    rows = codec.decode(packed, mx.float32)
    assert mx.square((rows - x) / 1e15).mean().item() < 0.05


def test_any_unit_gives_the_same_widths() -> None:
    x = rows_of(DECAY, 256, 10)
    bits = [coded(x * unit, 256)[1]["bits"] for unit in (1.0, 1e-6, 1e6)]
    assert all(mx.array_equal(bits[0], other).item() for other in bits[1:])
