"""Which rows stay, and the smoothing of scores, against numpy."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.cache.scorers import WindowAttention, key_difference
from veloxquant.cache.selection import average_pool, select_rows


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 40),
    sink=st.integers(0, 5),
    recent=st.integers(0, 8),
    extra=st.integers(0, 40),
    levels=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_forced_rows_then_the_best_earlier_ones_first(
    n: int, sink: int, recent: int, extra: int, levels: int, seed: int
) -> None:
    if sink + recent > n:
        return
    budget = min(n, sink + recent + extra)
    scores = np.random.default_rng(seed).integers(0, levels, (2, 3, n)).astype(np.float32)
    kept = np.array(select_rows(mx.array(scores), budget, sink, recent))
    assert kept.shape == (2, 3, budget)
    assert kept.dtype == np.int32
    for b, h in np.ndindex(2, 3):
        middle = range(sink, n - recent)
        best = sorted(middle, key=lambda j, s=scores[b, h]: (-s[j], j))[: budget - sink - recent]
        assert kept[b, h].tolist() == sorted({*range(sink), *range(n - recent, n), *best})


def test_no_number_is_the_worst_number() -> None:
    scores = mx.array([[[0.0, float("nan"), -5.0, 1.0]]])
    assert select_rows(scores, 3, 0, 0).tolist() == [[[0, 2, 3]]]


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 50), kernel=st.sampled_from([1, 3, 5, 7]), seed=st.integers(0, 99))
def test_average_pool_counts_zeros_beyond_the_ends(n: int, kernel: int, seed: int) -> None:
    x = np.random.default_rng(seed).random((2, 3, n)).astype(np.float32)
    got = np.array(average_pool(mx.array(x), kernel))
    wanted = [[np.convolve(row, np.full(kernel, 1 / kernel), "same")[-n:] if n >= kernel
               else np.convolve(row, np.full(kernel, 1 / kernel))[kernel // 2 : kernel // 2 + n]
               for row in rows] for rows in x]  # fmt: skip
    assert np.abs(got - np.array(wanted)).max() < 1e-6


def reference_scores(q: np.ndarray, k: np.ndarray, window: int, kernel: int, scale: float):
    """SnapKV's score in float64: summed softmax of the window's queries, pooled, group mean."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    n_q, heads, n = q.shape[1], k.shape[1], k.shape[2]
    mass = np.zeros((q.shape[0], heads, n))
    for h in range(n_q):
        logits = q[:, h, -window:] @ k[:, h // (n_q // heads)].swapaxes(-1, -2) * scale
        logits[:, ~np.tril(np.ones((window, n), dtype=bool), n - window)] = -np.inf
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mass[:, h // (n_q // heads)] += weights.sum(axis=1) / (n_q // heads)
    out = np.zeros_like(mass)
    padded = np.pad(mass[..., : n - window], [(0, 0), (0, 0), (kernel // 2, kernel // 2)])
    for j in range(n - window):
        out[..., j] = padded[..., j : j + kernel].mean(axis=-1)
    return out


def normal(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


class Held:
    """Rows as a scorer sees them."""

    def __init__(self, keys: mx.array) -> None:
        self.held, self.columns = keys, {}

    @property
    def rows(self) -> int:
        return self.held.shape[2]

    def keys(self, stop: int | None = None) -> mx.array:
        return self.held[:, :, :stop]


HELD: Any = Held(mx.zeros((1, 1, 0, 1)))


@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("pieces", [[100], [40, 60], [97, 3], [30, 1, 1, 68]])
def test_window_attention_is_the_published_score(repeat: int, pieces: list[int]) -> None:
    q, k = normal(2, 2 * repeat, 100, 32, seed=1), normal(2, 2, 100, 32, seed=2)
    scorer = WindowAttention(8, 5)
    start = 0
    for n in pieces:
        scorer.observe(HELD, q[:, :, start : start + n], 32**-0.5)
        start += n
    wanted = reference_scores(np.array(q), np.array(k), 8, 5, 32**-0.5)
    assert np.abs(np.array(scorer.score(Held(k))) - wanted).max() < 1e-5
    assert sum(a.nbytes for a in scorer.arrays()) == q[:, :, :8].nbytes


def test_a_constant_on_all_logits_changes_nothing() -> None:
    q, k = normal(1, 2, 50, 32, seed=3), normal(1, 2, 50, 32, seed=4)
    one, other = WindowAttention(8, 5), WindowAttention(8, 5)
    one.observe(HELD, q, 0.2)
    # A channel in which all keys are alike shifts all logits of a query by the same amount.
    k = mx.where(mx.arange(32) == 0, 1.0, k)
    other.observe(HELD, mx.where(mx.arange(32) == 0, q + 7.0, q), 0.2)
    assert mx.abs(one.score(Held(k)) - other.score(Held(k))).max().item() < 1e-5


def test_equal_query_heads_count_once() -> None:
    q, k = normal(1, 2, 50, 32, seed=5), normal(1, 2, 50, 32, seed=6)
    one, many = WindowAttention(8, 5), WindowAttention(8, 5)
    one.observe(HELD, q, 0.2)
    many.observe(HELD, mx.repeat(q, 4, axis=1), 0.2)
    assert mx.abs(one.score(Held(k)) - many.score(Held(k))).max().item() < 1e-6


def test_a_key_unlike_the_others_stands_out() -> None:
    k = mx.ones((1, 2, 30, 16)) + 0.05 * normal(1, 2, 30, 16, seed=7)
    k[:, :, 11] = -k[:, :, 11]
    assert key_difference(k).argmax(axis=-1).tolist() == [[11, 11]]
    assert mx.isfinite(key_difference(mx.zeros((1, 1, 4, 8)))).all().item()
