import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.core.exceptions import BlockPoolExhaustedError
from veloxquant.memory import BlockPoolAllocator, Lease, PoolConfig, Promises


def make(n_blocks=8, **settings):
    settings.setdefault("separate_kv", False)
    return BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=n_blocks, **settings))


def test_charge_grows_by_whole_blocks_and_marks_the_last_one():
    pool = make()
    lease = Lease(pool)
    for tokens, blocks, last in ((1, 1, 1), (4, 1, 4), (5, 2, 1), (5, 2, 1), (3, 2, 1), (14, 4, 2)):
        lease.charge(tokens)
        held = pool.blocks_for(lease.owner)
        assert len(held) == lease.blocks == blocks
        assert held[-1].n_used == last
        assert all(block.n_used == 4 for block in held[:-1])
    assert lease.tokens == 14


def test_charge_that_cannot_be_met_changes_nothing():
    pool = make(n_blocks=3)
    lease = Lease(pool)
    lease.charge(5)
    with pytest.raises(BlockPoolExhaustedError):
        lease.charge(13)
    assert (lease.tokens, lease.blocks, pool.n_free()) == (5, 2, 1)
    assert pool.blocks_for(lease.owner)[1].n_used == 1
    lease.charge(12)


def test_two_streams_are_charged_together_or_not_at_all():
    pool = make(n_blocks=5, separate_kv=True)
    lease = Lease(pool, stream=("k", "v"))
    with pytest.raises(BlockPoolExhaustedError):
        lease.charge(12)
    assert (pool.n_free("k"), pool.n_free("v"), lease.tokens) == (3, 2, 0)
    lease.charge(8)
    assert lease.blocks == 4


def test_unknown_stream_is_refused_when_the_lease_opens():
    with pytest.raises(ValueError, match="stream 'kv'"):
        Lease(make(separate_kv=True))


def test_shrink_returns_blocks_beyond_and_release_the_rest_once():
    pool = make()
    lease = Lease(pool, owner=3)
    lease.charge(14)
    assert lease.shrink(14) == 0
    assert lease.shrink(6) == 2
    assert [block.n_used for block in pool.blocks_for(3)] == [4, 2]
    assert lease.shrink(99) == 0
    assert lease.tokens == 6
    with pytest.raises(ValueError, match="tokens=-1"):
        lease.shrink(-1)
    assert lease.release() == 2
    assert lease.release() == 0
    assert pool.n_free() == 8
    assert lease.is_released
    with pytest.raises(RuntimeError, match="released"):
        lease.charge(1)


def test_context_manager_releases_after_an_error():
    pool = make()
    seen = []

    def fail():
        with Lease(pool) as lease:
            lease.charge(9)
            seen.append(repr(lease))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "tokens=9, blocks=3" in seen[0]
    assert pool.n_free() == 8


def test_leases_without_owner_do_not_free_each_other():
    pool = make()
    one, two = Lease(pool), Lease(pool)
    one.charge(4)
    two.charge(4)
    one.release()
    assert (two.blocks, pool.n_free()) == (1, 7)


def test_blocks_freed_by_the_pool_are_charged_again():
    pool = make()
    lease = Lease(pool, owner=3)
    lease.charge(9)
    pool.free_all(3)
    assert pool.n_free() == 8
    lease.charge(10)
    assert (lease.blocks, pool.n_free()) == (3, 5)
    pool.free_all(3)
    assert lease.release() == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=20))
def test_lease_always_holds_exactly_the_blocks_of_its_tokens(steps):
    pool = make()
    lease = Lease(pool)
    tokens = 0
    for is_charge, n in steps:
        if not is_charge:
            lease.shrink(n)
            tokens = min(tokens, n)
        elif n > 32:
            with pytest.raises(BlockPoolExhaustedError):
                lease.charge(n)
        else:
            lease.charge(n)
            tokens = max(tokens, n)
        held = pool.blocks_for(lease.owner)
        assert lease.tokens == tokens
        assert lease.blocks == len(held) == -(-tokens // 4)
        assert sum(block.n_used for block in held) == tokens
        assert pool.stats.blocks_in_use() == len(held)


def test_promises_never_exceed_what_the_pool_can_hold():
    pool = make(n_blocks=10)
    promises = Promises(pool)
    assert promises.try_promise(6)
    assert not promises.try_promise(5)
    assert not promises.try_promise(3, held_outside=2)
    assert promises.try_promise(2, held_outside=2)
    assert promises.promised == 8
    promises.withdraw(6)
    assert promises.try_promise(8)
    with pytest.raises(ValueError, match="10 are promised"):
        promises.withdraw(11)
    with pytest.raises(ValueError, match="0 or more"):
        promises.try_promise(-1)
    assert promises.could_ever(10)
    assert not promises.could_ever(11)


def test_promises_follow_growth():
    assert Promises(make(n_blocks=1, grow_on_exhaustion=True)).try_promise(10**9)
    limited = Promises(make(n_blocks=1, grow_on_exhaustion=True, max_blocks=4))
    assert limited.try_promise(4)
    assert not limited.try_promise(1)


def test_threads_never_promise_too_much():
    promises = Promises(make(n_blocks=10))
    over: list[int] = []

    def work():
        for _ in range(500):
            if promises.try_promise(3):
                if promises.promised > 10:
                    over.append(promises.promised)
                promises.withdraw(3)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not over
    assert promises.promised == 0
