import mlx.core as mx
import numpy as np
import pytest

from veloxquant.codebooks.adaptive_codebook import AdaptiveScalarCodebook
from veloxquant.codebooks.base import CodebookFactory
from veloxquant.core.exceptions import QuantizerConfigError


def laplace(n: int, d: int, seed: int = 0) -> np.ndarray:
    scale = 1 / np.sqrt(2 * d)
    return np.random.default_rng(seed).laplace(scale=scale, size=(n, d)).astype(np.float32)


def error(book: AdaptiveScalarCodebook, y: np.ndarray) -> float:
    return float(np.square(np.array(book.dequantize(book.quantize(y))) - y).mean())


@pytest.mark.parametrize("b", [1, 2, 3, 4])
def test_fit_lowers_the_error_on_other_laws(b: int) -> None:
    y = laplace(200, 32)
    book = AdaptiveScalarCodebook(b, 32, n_calib=64)
    before = error(book, y)
    book.observe(y)
    assert book.is_calibrated
    assert error(book, y) < before * 0.99
    assert np.all(np.diff(book.centroids_numpy()) > 0)


def test_until_calibrated_it_is_the_gaussian_table() -> None:
    book = AdaptiveScalarCodebook(2, 16, n_calib=10)
    gaussian = CodebookFactory.create("gaussian", 2, 16).centroids_numpy()
    book.observe(laplace(9, 16))
    assert not book.is_calibrated
    assert np.array_equal(book.centroids_numpy(), gaussian)
    book.observe(mx.array(laplace(1, 16, 1)).astype(mx.bfloat16))
    assert book.is_calibrated


def test_all_rows_of_one_call_count_and_calls_do_not_matter() -> None:
    y = laplace(100, 16)
    whole, cut = (AdaptiveScalarCodebook(2, 16, n_calib=100) for _ in range(2))
    whole.observe(y)
    for part in np.split(y, 4):
        cut.observe(part)
    assert np.array_equal(whole.centroids_numpy(), cut.centroids_numpy())
    early = AdaptiveScalarCodebook(2, 16, n_calib=10)
    early.observe(y)
    assert np.array_equal(early.centroids_numpy(), whole.centroids_numpy())


def test_fit_happens_once_and_survives_constant_data() -> None:
    book = AdaptiveScalarCodebook(3, 4, n_calib=2)
    book.observe(np.zeros((5, 4)))
    levels = book.centroids_numpy()
    assert np.isfinite(levels).all()
    book.observe(laplace(500, 4))
    assert np.array_equal(book.centroids_numpy(), levels)


def test_documented_properties() -> None:
    book = AdaptiveScalarCodebook(2, 8)
    levels, cuts = book.get_codebook()
    assert (book.k, book.b, levels.shape, cuts.shape) == (4, 2, (4,), (3,))
    with pytest.raises(QuantizerConfigError, match="bits"):
        AdaptiveScalarCodebook(3, 8, default_codebook=CodebookFactory.create("gaussian", 2, 8))
