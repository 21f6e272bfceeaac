"""The pool against a plain model of it, step by random step; mirrors block_pool.py."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from veloxquant.core.exceptions import BlockPoolExhaustedError
from veloxquant.memory import BlockPoolAllocator, PoolConfig

SIZE = 4
owners = st.integers(0, 3)
streams = st.sampled_from("kv")
tokens = st.integers(1, 30)


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        n_blocks=st.integers(0, 12),
        separate=st.booleans(),
        room=st.none() | st.integers(0, 10),
        grows=st.booleans(),
    )
    def build(self, n_blocks, separate, room, grows):
        limit = None if room is None else n_blocks + room
        self.pool = BlockPoolAllocator(PoolConfig(SIZE, n_blocks, separate, grows, limit))
        self.held = {}
        self.freed = []
        self.seen = set()
        self.reused = 0
        self.retired = Counter()
        self.first = n_blocks
        self.limit = limit if grows else n_blocks
        self.names = ("k", "v") if separate else ("kv",)

    def name(self, stream):
        return stream if len(self.names) == 2 else "kv"

    def take(self, requests, owner):
        need = Counter()
        for stream, n in requests:
            need[self.name(stream)] += -(-n // SIZE)
        short = sum(max(0, n - self.pool.n_free(name)) for name, n in need.items())
        grows = self.pool.config.grow_on_exhaustion
        fits = not short or (
            grows and (self.limit is None or self.pool.stats.n_blocks + short <= self.limit)
        )
        before = self.pool.stats
        if not fits:
            with pytest.raises(BlockPoolExhaustedError):
                self.pool.allocate_many(requests, owner)
            after = self.pool.stats
            assert after.n_exhausted == before.n_exhausted + 1
            after.n_exhausted -= 1
            assert after == before
            return
        parts = self.pool.allocate_many(requests, owner)
        for (stream, n), blocks in zip(requests, parts, strict=True):
            assert sum(block.n_used for block in blocks) == n
            assert {block.stream for block in blocks} == {self.name(stream)}
            self.held.setdefault(owner, []).extend(blocks)
            ids = {block.block_id for block in blocks}
            self.reused += len(ids & self.seen)
            self.seen |= ids
        assert self.pool.stats.n_grown - before.n_grown == short

    @rule(stream=streams, n=tokens, owner=owners)
    def allocate(self, stream, n, owner):
        self.take([(stream, n)], owner)

    @rule(n=tokens, m=tokens, owner=owners)
    def allocate_both(self, n, m, owner):
        self.take([("k", n), ("v", m)], owner)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def free_some(self, data):
        owner = data.draw(st.sampled_from([o for o, blocks in self.held.items() if blocks]))
        some = data.draw(st.lists(st.sampled_from(self.held[owner]), unique_by=id, max_size=4))
        self.pool.free(some)
        self.held[owner] = [b for b in self.held[owner] if not any(b is x for x in some)]
        self.freed += some

    @rule(owner=owners)
    def free_all(self, owner):
        self.pool.free_all(owner)
        self.freed += self.held.pop(owner, [])

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def free_again(self, data):
        with pytest.raises(ValueError, match="not checked out"):
            self.pool.free([data.draw(st.sampled_from(self.freed))])

    @rule(stream=streams, keep=st.integers(0, 4))
    def shrink(self, stream, keep):
        name = self.name(stream)
        free = self.pool.n_free(name)
        retired = self.pool.shrink(name, keep)
        assert retired == max(0, free - keep)
        self.retired[name] += retired

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), n_used=st.integers(0, SIZE))
    def mark(self, data, n_used):
        block = data.draw(st.sampled_from([b for blocks in self.held.values() for b in blocks]))
        self.pool.mark_used(block, n_used)

    @invariant()
    def conserves_blocks(self):
        stats, layout = self.pool.stats, self.pool.layout()
        mine = [block for blocks in self.held.values() for block in blocks]
        used = [block.block_id for block in mine]
        assert len(set(used)) == len(used), "a block has two owners"
        assert sorted(used) == sorted(i for of in layout.held.values() for i in of)
        assert not set(used) & set(layout.free)
        assert len(set(layout.free)) == len(layout.free)
        assert stats.blocks_in_use() == len(used)
        assert stats.n_blocks == len(used) + len(layout.free)
        assert stats.n_blocks + stats.n_retired == self.first + stats.n_grown == layout.n_ids
        assert stats.n_reused == self.reused
        assert stats.n_retired == self.retired.total()
        assert sum(self.pool.n_free(name) for name in self.names) == len(layout.free)
        part = {block.block_id for block in mine if 0 < block.n_used < SIZE}
        assert layout.part == part
        assert stats.fragmentation() == (len(part) / stats.n_blocks if stats.n_blocks else 0.0)
        for owner in range(4):
            found = self.pool.blocks_for(owner)
            assert [id(b) for b in found] == [id(b) for b in self.held.get(owner, [])]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
