"""A stream is, at any time, what its plan says for its length."""

import itertools

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.cache.plans import AtOnce, StreamPlan, Trailing, WholeBlocks
from veloxquant.cache.stream import Stream
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.codebook import CodebookSpec
from veloxquant.quantizers.specs.plain import PlainSpec

DIM = 32
PLANS = [
    StreamPlan(PlainSpec(), AtOnce()),
    StreamPlan(CodebookSpec(2, 3, unbiased=True), AtOnce()),
    StreamPlan(AffineChannelSpec(2, 32), WholeBlocks(64)),
    StreamPlan(AffineChannelSpec(2, 32), WholeBlocks(32), n_sink=5),
    StreamPlan(AffineTokenSpec(2, 32), Trailing(48)),
    StreamPlan(AffineTokenSpec(2, 32), Trailing(32, 8), n_sink=3),
]


def rows(n: int, seed: int) -> mx.array:
    return mx.random.normal((1, 2, n, DIM), key=mx.random.key(seed))


def check(stream: Stream, total: int) -> None:
    assert stream.length == total
    assert tuple(s.length for s in stream.all_stores()) == stream.plan.rows(total)
    assert sum(a.nbytes for a in stream.arrays()) == 2 * stream.plan.nbytes(total, DIM, 4)


@settings(deadline=None, max_examples=40)
@given(
    plan=st.sampled_from(PLANS),
    moves=st.lists(st.integers(-120, 120).filter(bool), min_size=1, max_size=8),
)
def test_any_history_leaves_the_layout_of_the_plan(plan: StreamPlan, moves: list[int]) -> None:
    stream, total = Stream(plan, DIM), 0
    for seed, move in enumerate(moves):
        if move > 0:
            stream.append(rows(move, seed))
            total += move
        else:
            n = min(-move, total)
            stream.trim(n)
            total -= n
        check(stream, total)


@settings(deadline=None, max_examples=30)
@given(plan=st.sampled_from(PLANS), cuts=st.sets(st.integers(1, 199), max_size=6))
def test_pieces_do_not_matter(plan: StreamPlan, cuts: set[int]) -> None:
    x = rows(200, 7)
    whole, parts = Stream(plan, DIM), Stream(plan, DIM)
    whole.append(x)
    edges = [0, *sorted(cuts), 200]
    for start, stop in itertools.pairwise(edges):
        parts.append(x[:, :, start:stop])
    for a, b in zip(whole.all_stores(), parts.all_stores(), strict=True):
        left, right = a.compact(), b.compact()
        assert left[:3] == right[:3]
        for name, array in left[3].items():
            assert mx.array_equal(array, right[3][name]).item()


@pytest.mark.parametrize("plan", PLANS)
def test_exact_parts_are_the_input(plan: StreamPlan) -> None:
    x = rows(333, 8)
    stream = Stream(plan, DIM)
    stream.append(x)
    sinks, body, window = plan.rows(333)
    if sinks:
        assert mx.array_equal(stream.sinks.decode(0, sinks, mx.float32), x[:, :, :sinks]).item()
    if window:
        got = stream.window.decode(0, window, mx.float32)
        assert mx.array_equal(got, x[:, :, sinks + body :]).item()


@given(tokens=st.integers(0, 2_000), size=st.sampled_from([32, 128]), step=st.integers(1, 64))
def test_frontiers_only_move_on(tokens: int, size: int, step: int) -> None:
    for schedule in (AtOnce(), WholeBlocks(size), Trailing(size, step)):
        now, later = schedule.frontier(tokens), schedule.frontier(tokens + 1)
        assert 0 <= now <= later <= tokens + 1
    assert tokens - Trailing(size, step).frontier(tokens) <= size + step - 1
    assert tokens - WholeBlocks(size).frontier(tokens) < size
