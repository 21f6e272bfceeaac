"""A stream in tiers is, at any time, what its plan says for its length."""

import itertools

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.cache.layouts.tiered import AgePlan, age_tiered_plan
from veloxquant.cache.tiers import AgeStream
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import AgeTieredKVOptions

DIM = 40


def plans(recent: int, mid: int, widths: tuple[int, int, int] = (8, 4, 2)) -> tuple[AgePlan, ...]:
    options = AgeTieredKVOptions(recent, mid, *widths)
    layer = age_tiered_plan(KVCacheConfig(method="age_tiered", options=options))
    assert isinstance(layer.keys, AgePlan)
    assert isinstance(layer.values, AgePlan)
    return layer.keys, layer.values


PLANS = [*plans(32, 96), *plans(0, 70), *plans(50, 51, (6, 6, 3))]


def rows(n: int, seed: int) -> mx.array:
    return mx.random.normal((1, 2, n, DIM), key=mx.random.key(seed))


def check(stream: AgeStream, total: int) -> None:
    plan = stream.plan
    assert stream.length == total
    assert tuple(s.length for s in stream.all_stores()) == plan.rows(total)
    assert sum(a.nbytes for a in stream.arrays()) == 2 * plan.nbytes(total, DIM, 4)


@settings(deadline=None, max_examples=30)
@given(
    plan=st.sampled_from(PLANS),
    moves=st.lists(st.integers(-150, 150).filter(bool), min_size=1, max_size=8),
)
def test_any_history_leaves_the_layout_of_the_plan(plan: AgePlan, moves: list[int]) -> None:
    stream, total = AgeStream(plan, DIM), 0
    for seed, move in enumerate(moves):
        if move > 0:
            stream.append(rows(move, seed))
            total += move
        else:
            n = min(-move, total)
            stream.trim(n)
            total -= n
        check(stream, total)


@settings(deadline=None, max_examples=20)
@given(plan=st.sampled_from(PLANS), cuts=st.sets(st.integers(1, 299), max_size=6))
def test_pieces_do_not_matter(plan: AgePlan, cuts: set[int]) -> None:
    x = rows(300, 7)
    whole, parts = AgeStream(plan, DIM), AgeStream(plan, DIM)
    whole.append(x)
    for start, stop in itertools.pairwise([0, *sorted(cuts), 300]):
        parts.append(x[:, :, start:stop])
    for a, b in zip(whole.all_stores(), parts.all_stores(), strict=True):
        left, right = a.compact(), b.compact()
        assert left[:3] == right[:3]
        for name, array in left[3].items():
            assert mx.array_equal(array, right[3][name]).item()


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 128, 159, 160, 1023, 1024, 1056, 5000])
def test_tiers_lag_by_less_than_a_block(tokens: int) -> None:
    plan = plans(128, 1024)[0]
    old, mid, recent, window = plan.rows(tokens)
    assert old + mid + recent + window == tokens
    assert window < 32
    assert 0 <= max(0, tokens - 1024) - old < 32
    assert 0 <= max(0, tokens - 128) - (old + mid) < 32
