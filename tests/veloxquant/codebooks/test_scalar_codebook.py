import mlx.core as mx
import numpy as np
import pytest

from veloxquant.codebooks.base import CodebookFactory
from veloxquant.codebooks.scalar_codebook import ScalarCodebook
from veloxquant.core.exceptions import CodebookDimensionMismatch, QuantizerConfigError


@pytest.mark.parametrize("b", [1, 3, 4, 5, 6])
def test_quantize_finds_the_nearest_level(b: int) -> None:
    levels = np.sort(np.random.default_rng(b).standard_normal(1 << b)).astype(np.float32)
    book = ScalarCodebook(levels)
    y = np.random.default_rng(0).standard_normal((5, 300)).astype(np.float32)
    index = np.array(book.quantize(y))
    assert index.dtype == np.uint8
    assert np.array_equal(index, np.abs(y[..., None] - levels).argmin(-1))
    again = book.quantize(book.dequantize(index))
    assert np.array_equal(np.array(again), index)
    assert [book.nearest_numpy(v) for v in y[0, :20]] == index[0, :20].tolist()


def test_a_value_on_a_boundary_goes_down() -> None:
    for levels in (np.arange(4.0), np.arange(32.0)):
        book = ScalarCodebook(levels)
        assert book.quantize(np.array([0.5, 1.5])).tolist() == [0, 1]
        assert book.nearest_numpy(1.5) == 1


def test_codebook_says_what_it_is() -> None:
    book = ScalarCodebook(np.array([3.0, -1.0, 1.0, 0.0]))
    assert (book.k, book.b) == (4, 2)
    assert book.centroids_numpy().tolist() == [-1, 0, 1, 3]
    assert book.boundaries_mx().tolist() == [-0.5, 0.5, 2]
    assert book.centroids_mx().shape == (4,)


@pytest.mark.parametrize("levels", [[], [1.0], [1, 2, 3], [0, np.nan], np.arange(512)])
def test_codebooks_of_other_lengths_are_refused(levels: list[float]) -> None:
    with pytest.raises(CodebookDimensionMismatch):
        ScalarCodebook(np.asarray(levels))


def test_factory_shares_codebooks() -> None:
    assert CodebookFactory.create("gaussian", 2, 64) is CodebookFactory.create("gaussian", 2, 64)
    assert CodebookFactory.create("uniform", 1, 64).centroids_numpy().tolist() == [-0.5, 0.5]
    angle = CodebookFactory.create("polar_level", 2, 64, polar_level=3).centroids_numpy()
    assert angle == pytest.approx([0.426, 0.674, 0.896, 1.145], abs=1e-3)
    with pytest.raises(QuantizerConfigError, match="distribution"):
        CodebookFactory.create("cauchy", 2, 64)  # pyright: ignore[reportArgumentType]


def test_quantize_takes_any_float_type() -> None:
    book = CodebookFactory.create("gaussian", 2, 1)
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        assert book.quantize(mx.array([-2.0, 0.1], dtype=dtype)).tolist() == [0, 2]
