import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.memory import BlockPoolAllocator, PoolConfig
from veloxquant.memory.cells import run_length_cells


def make(n_blocks, **settings):
    return BlockPoolAllocator(
        PoolConfig(block_size=4, n_blocks=n_blocks, separate_kv=False, **settings)
    )


def test_runs_tell_full_part_and_free_blocks_by_owner():
    pool = make(10)
    pool.allocate("kv", 12, 7)
    pool.allocate("kv", 5, -2)
    gap = pool.allocate("kv", 4, 9)
    pool.allocate("kv", 8, 7)
    pool.free(gap)
    assert run_length_cells(pool) == [
        (3, "#", 7),
        (1, "#", -2),
        (1, "*", -2),
        (1, ".", 0),
        (2, "#", 7),
        (2, ".", 0),
    ]


def test_retired_blocks_leave_no_gap_and_an_empty_pool_no_runs():
    pool = make(8, grow_on_exhaustion=True)
    pool.allocate("kv", 8, 1)
    pool.shrink("kv", 0)
    pool.allocate("kv", 9, 2)
    assert run_length_cells(pool) == [(2, "#", 1), (2, "#", 2), (1, "*", 2)]
    assert run_length_cells(make(0)) == []


def test_limit_must_be_positive():
    with pytest.raises(ValueError, match="limit=0"):
        run_length_cells(make(1), 0)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=40),
    st.sets(st.integers(0, 4)),
    st.integers(1, 40),
)
def test_runs_decode_to_the_blocks_and_the_limit_holds(allocations, freed, limit):
    pool = make(130)
    for owner, tokens in allocations:
        pool.allocate("kv", tokens, owner)
    for owner in freed:
        pool.free_all(owner)
    want = [(".", 0)] * 130
    for owner in range(5):
        for block in pool.blocks_for(owner):
            want[block.block_id] = ("#" if block.n_used == 4 else "*", owner)
    runs = run_length_cells(pool)
    assert [(state, owner) for n, state, owner in runs for _ in range(n)] == want
    assert all(runs[i][1:] != runs[i + 1][1:] for i in range(len(runs) - 1))
    coarse = run_length_cells(pool, limit)
    assert len(coarse) <= limit
    assert sum(n for n, _, _ in coarse) == 130
    assert {run[1:] for run in coarse} <= {run[1:] for run in runs}


def test_hundred_thousand_blocks_take_milliseconds():
    pool = make(100_000)
    for i in range(20_000):
        pool.allocate("kv", 18, i % 40)
    best = 1.0
    for _ in range(5):
        start = time.thread_time()
        runs = run_length_cells(pool, 500)
        best = min(best, time.thread_time() - start)
    assert sum(n for n, _, _ in runs) == 100_000
    assert best < 0.050
