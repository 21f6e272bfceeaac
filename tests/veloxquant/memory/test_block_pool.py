import threading
import time

import pytest

from veloxquant.core.exceptions import (
    BlockPoolExhaustedError,
    OwnerAlreadyActiveError,
    QuantizerConfigError,
)
from veloxquant.memory import Block, BlockPoolAllocator, PoolConfig


def make(n_blocks=8, **settings):
    return BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=n_blocks, **settings))


def ids(blocks):
    return [block.block_id for block in blocks]


def test_defaults_are_the_documented_ones():
    config = BlockPoolAllocator().config
    assert config == PoolConfig(16, 1024, True, False, None)
    block = Block(3)
    assert (block.stream, block.format, block.n_used, block.owner, block.ever_allocated) == (
        "kv",
        "fp16",
        0,
        None,
        False,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 0},
        {"n_blocks": -1},
        {"n_blocks": 9, "grow_on_exhaustion": True, "max_blocks": 8},
    ],
)
def test_sizes_that_cannot_work_are_refused(settings):
    with pytest.raises(QuantizerConfigError):
        PoolConfig(**settings)


def test_max_blocks_is_ignored_without_growth():
    assert PoolConfig(n_blocks=9, max_blocks=1).n_blocks == 9


def test_documented_example_gives_blocks_in_order_and_takes_them_back():
    pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=256))
    blocks = pool.allocate(stream="k", n_tokens=40, owner=7, format="int2")
    assert [block.n_used for block in blocks] == [16, 16, 8]
    assert all(
        b.owner == 7 and b.stream == "k" and b.format == "int2" and b.ever_allocated for b in blocks
    )
    assert pool.blocks_for(7) == blocks
    pool.free_all(owner=7)
    assert pool.n_free("k") == 128
    assert pool.blocks_for(7) == []
    assert all(block.owner is None and block.n_used == 0 for block in blocks)


def test_freed_block_is_handed_out_next():
    pool = make(separate_kv=False)
    a, b, _ = (pool.allocate("k", 4, owner)[0] for owner in (1, 2, 3))
    pool.free([a])
    pool.free([b])
    assert ids(pool.allocate("v", 8, 4)) == [b.block_id, a.block_id]
    assert pool.stats.n_reused == 2


def test_keys_and_values_do_not_compete_and_an_odd_number_uses_every_block():
    pool = make(n_blocks=9)
    assert (pool.n_free("k"), pool.n_free("v")) == (5, 4)
    keys, values = pool.allocate("k", 20, 1), pool.allocate("v", 16, 1)
    assert sorted(ids(keys) + ids(values)) == list(range(9))
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 1, 1)


def test_single_free_list_serves_every_stream_as_kv():
    pool = make(n_blocks=3, separate_kv=False)
    assert [pool.allocate(stream, 1, 1)[0].stream for stream in ("k", "v", "kv")] == ["kv"] * 3


@pytest.mark.parametrize("tokens", [0, -3])
def test_allocate_refuses_tokens_that_are_not_positive(tokens):
    with pytest.raises(ValueError, match="n_tokens"):
        make().allocate("k", tokens, 1)


@pytest.mark.parametrize("stream", ["kv", "K", ""])
def test_unknown_stream_is_refused(stream):
    pool = make()
    for call in (
        lambda: pool.allocate(stream, 1, 1),
        lambda: pool.n_free(stream),
        lambda: pool.shrink(stream, 0),
    ):
        with pytest.raises(ValueError, match="stream"):
            call()


def test_failed_allocation_leaves_no_trace():
    pool = make(n_blocks=4)
    before = pool.stats
    with pytest.raises(BlockPoolExhaustedError, match=r"3 blocks of stream 'k' \(2 free\)"):
        pool.allocate("k", 9, owner=5)
    after = pool.stats
    assert after.n_exhausted == 1
    after.n_exhausted = 0
    assert after == before
    assert pool.n_free("k") == 2
    pool.register_owner(5)


def test_allocate_many_is_all_or_nothing_over_streams():
    pool = make(n_blocks=5)  # 3 for keys, 2 for values
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate_many([("k", 12), ("v", 12)], owner=1)
    assert (pool.n_free("k"), pool.n_free("v")) == (3, 2)
    keys, values = pool.allocate_many([("k", 12), ("v", 7)], owner=1)
    assert (len(keys), [block.n_used for block in values]) == (3, [4, 3])


def test_allocate_many_adds_up_requests_of_one_free_list():
    pool = make(n_blocks=5, separate_kv=False)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate_many([("k", 12), ("v", 12)], owner=1)
    assert pool.n_free() == 5


# ---- growth and shrink ----------------------------------------------------------------------


def test_growth_adds_just_enough_to_the_exhausted_stream():
    pool = make(n_blocks=4, grow_on_exhaustion=True)
    blocks = pool.allocate("k", 20, 1)
    assert len(set(ids(blocks))) == 5
    assert (pool.n_free("k"), pool.n_free("v")) == (0, 2)
    assert (pool.stats.n_grown, pool.stats.n_blocks) == (3, 7)
    assert pool.stats.n_reused == 0
    assert set(ids(pool.allocate("v", 8, 1))).isdisjoint(ids(blocks))


def test_growth_stops_at_max_blocks_over_all_streams():
    pool = make(n_blocks=4, grow_on_exhaustion=True, max_blocks=6)
    pool.allocate("k", 12, 1)
    with pytest.raises(BlockPoolExhaustedError, match="grow to 6"):
        pool.allocate("v", 16, 1)
    assert (pool.stats.n_blocks, pool.n_free("v")) == (5, 2)
    pool.allocate("v", 12, 1)
    assert pool.stats.n_blocks == 6
    assert pool.capacity() == 6


def test_capacity_without_limit_is_none_and_without_growth_what_is_there():
    assert make(grow_on_exhaustion=True).capacity() is None
    pool = make(separate_kv=False)
    pool.shrink("kv", 5)
    assert pool.capacity() == 5


def test_shrink_retires_free_blocks_only_and_for_good():
    pool = make(n_blocks=10, separate_kv=False)
    mine = pool.allocate("kv", 8, 1)
    assert pool.shrink("kv", 3) == 5
    assert pool.shrink("kv", 3) == 0
    assert (pool.n_free(), pool.stats.n_blocks, pool.stats.n_retired) == (3, 5, 5)
    assert pool.blocks_for(1) == mine
    pool.free_all(1)
    assert len(pool.allocate("kv", 20, 2)) == 5
    with pytest.raises(ValueError, match="target_free"):
        pool.shrink("kv", -1)


def test_retired_ids_do_not_come_back_by_growth():
    pool = make(n_blocks=4, separate_kv=False, grow_on_exhaustion=True)
    assert pool.shrink("kv", 0) == 4
    assert ids(pool.allocate("kv", 8, 1)) == [4, 5]
    assert pool.stats.fragmentation() == 0.0


# ---- free -----------------------------------------------------------------------------------


def test_free_of_some_blocks_keeps_the_order_of_the_rest():
    pool = make(separate_kv=False)
    blocks = pool.allocate("kv", 20, 1)
    pool.free([blocks[3], blocks[1]])
    assert pool.blocks_for(1) == [blocks[0], blocks[2], blocks[4]]


@pytest.mark.parametrize("case", ["freed", "twice", "foreign", "made up", "stale"])
def test_free_of_a_block_that_is_not_checked_out_changes_nothing(case):
    pool = make(separate_kv=False)
    good, bad = pool.allocate("kv", 8, 1)
    if case == "freed":
        pool.free([bad])
    elif case == "twice":
        bad = good
    elif case == "foreign":
        bad = make(separate_kv=False).allocate("kv", 4, 1)[0]
    elif case == "made up":
        bad = Block(bad.block_id, "kv", "fp16", 4, 1, True)
    else:  # freed, and the same block id has gone to somebody else since
        pool.free([bad])
        assert pool.allocate("kv", 4, 2)[0].block_id == bad.block_id
    before, free = pool.stats, pool.n_free()
    with pytest.raises(ValueError, match=r"not checked out|given twice"):
        pool.free([good, bad])
    assert (pool.stats, pool.n_free()) == (before, free)
    assert good.owner == 1


def test_free_all_of_an_unknown_owner_is_no_error():
    pool = make()
    pool.free_all(99)
    pool.free([])
    assert pool.stats.n_frees == 0


# ---- owners ---------------------------------------------------------------------------------


def test_register_owner_notices_a_second_claim_until_it_is_released():
    pool = make()
    pool.register_owner(1)
    with pytest.raises(OwnerAlreadyActiveError, match="owner 1"):
        pool.register_owner(1)
    pool.release_owner(1)
    pool.register_owner(1)
    pool.allocate("k", 1, 1)
    pool.release_owner(1)
    with pytest.raises(OwnerAlreadyActiveError, match="1 blocks"):
        pool.register_owner(1)
    pool.free_all(1)
    pool.register_owner(1)
    pool.allocate("k", 1, 1)
    pool.free_all(1)
    pool.register_owner(1)


def test_owner_that_never_registered_is_forgotten_with_its_last_block():
    pool = make()
    pool.free(pool.allocate("k", 1, 1))
    pool.register_owner(1)


def test_growing_owner_needs_no_claim():
    pool = make()
    assert len(pool.allocate("k", 4, 1) + pool.allocate("k", 4, 1)) == 2


def test_new_owner_is_never_repeated_and_never_taken():
    pool = make()
    pool.register_owner(-3)
    drawn = [pool.new_owner() for _ in range(3)]
    assert len({*drawn, -1, -3}) == 5


# ---- counters -------------------------------------------------------------------------------


def test_counters_follow_what_happened():
    pool = make(separate_kv=False)
    a = pool.allocate("kv", 10, 1)
    pool.allocate("kv", 4, 2)
    pool.free(a[:1])
    pool.free_all(1)
    pool.allocate("kv", 9, 3)
    stats = pool.stats
    assert (stats.n_allocations, stats.n_frees, stats.n_reused) == (3, 2, 3)
    assert (stats.blocks_in_use(), stats.peak_blocks_in_use) == (4, 4)


def test_mark_used_keeps_fragmentation_true():
    pool = make(n_blocks=4, separate_kv=False)
    one, two = pool.allocate("kv", 5, 1)
    assert pool.stats.fragmentation() == 0.25
    pool.mark_used(two, 4)
    assert pool.stats.fragmentation() == 0.0
    pool.mark_used(one, 2)
    pool.mark_used(one, 3)
    assert pool.stats.fragmentation() == 0.25
    pool.mark_used(one, 0)
    assert pool.stats.fragmentation() == 0.0
    pool.mark_used(one, 1)
    pool.free([one])
    assert pool.stats.fragmentation() == 0.0
    pool.mark_used(one, 3)
    assert (one.n_used, pool.stats.fragmentation()) == (3, 0.0)
    with pytest.raises(ValueError, match="n_used=5"):
        pool.mark_used(two, 5)


def test_fragmentation_survives_a_direct_write_to_a_block():
    pool = make(n_blocks=4, separate_kv=False)
    (block,) = pool.allocate("kv", 2, 1)
    block.n_used = 4
    pool.free_all(1)
    assert pool.stats.fragmentation() == 0.0


def test_history_records_events_and_stays_bounded():
    pool = make(n_blocks=2, separate_kv=False)
    pool.free(pool.allocate("kv", 1, 1))
    assert len(pool.history) == 1
    for _ in range(3000):
        with pytest.raises(BlockPoolExhaustedError):
            pool.allocate("kv", 100, 1)
    assert len(pool.history) == 1024
    assert pool.history[-1].n_exhausted == 3000
    pool.shrink("kv", 0)
    assert pool.history[-1].n_retired == 2
    assert pool.history[-2].n_retired == 0


# ---- threads and speed ----------------------------------------------------------------------


def test_threads_share_one_pool_without_losing_a_block():
    pool = make(n_blocks=64)
    clash: list[object] = []
    users: dict[int, int] = {}

    def work(owner):
        try:
            for i in range(300):
                try:
                    blocks = pool.allocate_many([("k", 5), ("v", 1 + i % 9)], owner)
                except BlockPoolExhaustedError:
                    continue
                clash.extend(
                    block
                    for block in blocks[0] + blocks[1]
                    if users.setdefault(block.block_id, owner) != owner
                )
                pool.mark_used(blocks[0][0], i % 4)
                for block in blocks[0] + blocks[1]:
                    del users[block.block_id]
                if i % 2:
                    pool.free_all(owner)
                else:
                    pool.free(blocks[0] + blocks[1])
        except Exception as error:
            clash.append(error)

    threads = [threading.Thread(target=work, args=(owner,)) for owner in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not clash
    assert (pool.n_free("k"), pool.n_free("v")) == (32, 32)
    assert pool.stats.blocks_in_use() == 0
    assert pool.stats.fragmentation() == 0.0


def best_seconds(work, rounds=7):
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)


def test_allocate_and_free_take_microseconds():
    pool = BlockPoolAllocator()

    def pairs():
        for _ in range(4000):
            pool.free(pool.allocate("k", 16, 7))

    assert 4000 / best_seconds(pairs) > 200_000 / 3


def test_free_all_is_linear():
    def seconds(n_blocks):
        pool = BlockPoolAllocator(PoolConfig(n_blocks=n_blocks, separate_kv=False))
        times = []
        for _ in range(7):
            pool.allocate("kv", n_blocks * 16, 1)
            start = time.thread_time()
            pool.free_all(1)
            times.append(time.thread_time() - start)
        return min(times)

    assert seconds(16_384) < 0.005 * 3
    assert seconds(32_768) / seconds(8_192) < 4 * 2.3
