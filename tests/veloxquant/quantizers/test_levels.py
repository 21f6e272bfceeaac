"""Fitted levels: the worked example, known errors, what sweeps and outliers do, bit order."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.dsa.mlx_pack import pack
from veloxquant.quantizers.kvquant import (
    dequant_nuq,
    fit_nuq_levels,
    fit_nuq_levels_batched,
    nuq_distortion,
    nuq_quant_dequant,
    quantize_nuq,
    split_dense_sparse,
    split_dense_sparse_batched,
)
from veloxquant.quantizers.levels import codes_of, lloyd_levels
from veloxquant.quantizers.sparse import corrected, largest, mark, missed

N = 16_384


def column(kind: str, seed: int = 0) -> mx.array:
    """Unit variance, (N, 1)."""
    draw = np.random.default_rng(seed)
    made = {
        "normal": lambda: draw.normal(size=(N, 1)),
        "laplace": lambda: draw.laplace(scale=0.5**0.5, size=(N, 1)),
    }
    return mx.array(made[kind]().astype(np.float32))


def test_the_worked_example() -> None:
    x = mx.array([[-1, -0.9, -0.2, -0.1, 0.1, 0.3, 0.8, 1.0]]).T
    start, end = fit_nuq_levels(x, 2, 0), fit_nuq_levels(x, 2, 8)
    assert mx.allclose(start[:, 0], mx.array([-0.9125, -0.1375, 0.175, 0.825])).item()
    assert mx.allclose(end[:, 0], mx.array([-0.95, -0.15, 0.2, 0.9]), atol=1e-6).item()
    assert nuq_distortion(x, end) == pytest.approx(0.00625, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "fraction", "error"),
    [("normal", 0, 0.0366), ("normal", 0.01, 0.0272), ("laplace", 0, 0.0607),
     ("laplace", 0.01, 0.0356)],
)  # fmt: skip
def test_errors_of_three_bits(kind: str, fraction: float, error: float) -> None:
    x = column(kind)
    lost = mx.square(nuq_quant_dequant(x, 3, fraction).astype(mx.float32) - x).mean().item()
    assert lost == pytest.approx(error, rel=0.08)


@pytest.mark.parametrize("kind", ["normal", "laplace"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_sweeps_never_lose_and_levels_beat_equal_steps(kind: str, bits: int) -> None:
    x = column(kind, seed=1)
    errors = [nuq_distortion(x, fit_nuq_levels(x, bits, n)) for n in (0, 1, 2, 4, 8, 16)]
    assert all(b <= a * (1 + 1e-5) for a, b in pairwise(errors))
    steps = mx.linspace(x.min().item(), x.max().item(), 1 << bits)[:, None]
    assert errors[-1] < nuq_distortion(x, steps)


def test_levels_ascend_and_are_no_more_than_the_values() -> None:
    x = mx.random.normal((500, 6), key=mx.random.key(0))
    levels = fit_nuq_levels(x, 4)
    assert levels.shape == (16, 6)
    assert (levels[1:] > levels[:-1]).all().item()
    few = mx.array([[0.0], [1.0], [2.0]] * 5)
    assert {0.0, 1.0, 2.0} <= set(fit_nuq_levels(few, 3)[:, 0].tolist())
    assert not nuq_distortion(few, fit_nuq_levels(few, 3))
    constant = fit_nuq_levels(mx.full((40, 2), 3.0), 2)
    assert mx.allclose(constant, mx.full((4, 2), 3.0)).item()


def test_codes_are_the_nearest_levels() -> None:
    x = mx.random.normal((200, 5), key=mx.random.key(1))
    levels = fit_nuq_levels(x, 3)
    codes = quantize_nuq(x, levels)
    assert codes.dtype == mx.int32
    distance = mx.abs(x[:, None] - levels[None])
    best = distance.min(axis=1)
    assert mx.allclose(mx.abs(mx.take_along_axis(levels, codes, axis=0) - x), best).item()
    assert dequant_nuq(codes, levels).dtype == mx.float16


def test_a_batch_is_its_members() -> None:
    x = mx.random.normal((3, 100, 4), key=mx.random.key(2))
    together, split = fit_nuq_levels_batched(x, 2), split_dense_sparse_batched(x, 0.05)
    for i in range(3):
        assert mx.allclose(together[i], fit_nuq_levels(x[i], 2), atol=1e-6).item()
        for a, b in zip(split, split_dense_sparse(x[i], 0.05), strict=True):
            assert mx.allclose(a[i], b).item()


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.01, 2), (0.1, 20)])
def test_a_share_of_each_column_is_taken_out(fraction: float, count: int) -> None:
    x = mx.random.normal((200, 7), key=mx.random.key(3))
    parts = split_dense_sparse(x, fraction)
    assert parts.outlier_mask.sum(axis=0).tolist() == [count] * 7
    assert mx.array_equal(mx.where(parts.outlier_mask, parts.outlier_vals, parts.inliers), x).item()
    if count:
        least = mx.where(parts.outlier_mask, mx.abs(x), mx.inf).min(axis=0)
        most = mx.where(parts.outlier_mask, 0, mx.abs(x)).max(axis=0)
        assert (least >= most).all().item()


def test_sums_of_a_long_row_do_not_disturb_the_order() -> None:
    x = 1_000 + mx.random.normal((1, 100_000), key=mx.random.key(4))
    levels = lloyd_levels(x, 3, 8)
    assert (levels[..., 1:] >= levels[..., :-1]).all().item()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_come_back_from_words(bits: int) -> None:
    codes = mx.random.randint(0, 1 << bits, (2, 3, 96), key=mx.random.key(5)).astype(mx.uint32)
    assert mx.array_equal(codes_of(pack(codes, bits), bits, 96), codes).item()
    assert mx.array_equal(codes_of(pack(codes, bits), bits, 80), codes[..., :80]).item()


# ---- slots ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 6, 7, 39])
def test_slots_hold_the_largest_entries(count: int) -> None:
    score = mx.random.uniform(shape=(2, 5, 40), key=mx.random.key(6))
    at = np.array(largest(score, count))
    wanted = np.sort(np.argsort(-np.array(score), axis=-1)[..., :count], axis=-1)
    assert (at == wanted).all()


def test_marks_are_the_slots() -> None:
    score = mx.random.uniform(shape=(2, 5, 40), key=mx.random.key(6))
    assert mark(score, 3).sum(axis=-1).tolist() == [[3] * 5] * 2
    assert not mark(score, 0).any().item()
    assert largest(score, 40).shape == score.shape


def test_differences_put_the_entries_back() -> None:
    x, coded = mx.random.normal((2, 8, 32), key=mx.random.key(7)), mx.zeros((2, 8, 32))
    at = largest(mx.abs(x), 4)
    back = corrected(coded, at, missed(x, coded, at, mx.float32))
    assert mx.array_equal(back, mx.where(mark(mx.abs(x), 4), x, 0.0)).item()
    empty = mx.zeros_like(at)
    assert mx.array_equal(corrected(x, empty, mx.zeros(at.shape)), x).item()
    far = missed(
        mx.full((1, 4), 6e4), mx.full((1, 4), -6e4), mx.array([[1]], mx.uint32), mx.float16
    )
    assert mx.isfinite(far).all().item()
