"""Fixed-size block bookkeeping for KV-cache storage: pure Python, no arrays, thread-safe."""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from operator import index

from veloxquant.core.exceptions import BlockPoolExhaustedError, OwnerAlreadyActiveError
from veloxquant.memory.block import Block, FreeList, PoolConfig, PoolLayout
from veloxquant.memory.stats import AllocationStats

__all__ = ["AllocationStats", "Block", "BlockPoolAllocator", "PoolConfig", "PoolLayout"]

HISTORY_LENGTH = 1024
"""Snapshots kept in `BlockPoolAllocator.history`."""
HISTORY_EVERY = 64
"""Successful allocations between two routine snapshots."""


class BlockPoolAllocator:
    """Hand out fixed-size blocks and take them back, last in, first out.

    One plain lock guards every method, so a pool may be shared by threads; no method calls out
    while it holds the lock. The pool counts blocks and knows their owners; buffers live elsewhere,
    for example in `MLXBlockStorage`. A call that raises changes nothing but `n_exhausted`.

    `history` keeps the last 1024 snapshots of the counters: the first allocation and every 64th
    after it, each growth, each refusal and each shrink.

    Example:
        pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=256))
        blocks = pool.allocate(stream="k", n_tokens=40, owner=7, format="int2")
        pool.free_all(owner=7)
    """

    history: deque[AllocationStats]

    def __init__(self, config: PoolConfig | None = None) -> None:
        self.config = config or PoolConfig()
        self.history = deque(maxlen=HISTORY_LENGTH)
        self._lock = threading.Lock()
        self._size = self.config.block_size
        total = self.config.n_blocks
        self._next_id = total
        if self.config.separate_kv:
            keys = total - total // 2
            k, v = FreeList("k", 0, keys), FreeList("v", keys, total)
            self._streams = {"k": k, "v": v}
            self._alias = self._streams
        else:
            kv = FreeList("kv", 0, total)
            self._streams = {"kv": kv}
            self._alias = {"k": kv, "v": kv, "kv": kv}
        self._held: dict[int | None, dict[int, Block]] = {}  # by owner and id, in order
        self._registered: set[int] = set()
        self._part: set[int] = set()  # ids of partly filled blocks
        self._stats = AllocationStats(n_blocks=total)
        self._owner_ids = count(-2, -1)  # -1 is the documented "no owner given"

    @property
    def stats(self) -> AllocationStats:
        """Snapshot of the counters."""
        with self._lock:
            return self._snapshot()

    # ---- owners -----------------------------------------------------------------------------

    def new_owner(self) -> int:
        """Draw an owner id nobody has: negative, below -1, never drawn twice from this pool."""
        with self._lock:
            return next(
                owner
                for owner in self._owner_ids
                if owner not in self._held and owner not in self._registered
            )

    def register_owner(self, owner: int) -> None:
        """Claim `owner`, so that a second claim of the same id is noticed.

        The claim lasts until `release_owner` or `free_all`. `allocate` needs no claim.

        Raises:
            OwnerAlreadyActiveError: when `owner` holds blocks or is claimed already.
        """
        with self._lock:
            held = len(self._held.get(owner, ()))
            if held or owner in self._registered:
                raise OwnerAlreadyActiveError(
                    f"owner {owner} is still active with {held} blocks; "
                    "free them with free_all(owner) or use another id"
                )
            self._registered.add(owner)

    def release_owner(self, owner: int) -> None:
        """Give up the claim on `owner`; blocks it holds stay checked out."""
        with self._lock:
            self._registered.discard(owner)

    # ---- allocation -------------------------------------------------------------------------

    def allocate(self, stream: str, n_tokens: int, owner: int, format: str = "fp16") -> list[Block]:
        """Check out enough blocks for `n_tokens` slots; all but the last are full.

        Args:
            stream: "k" or "v"; any of "k", "v", "kv" when the pool has one free list.
            n_tokens: slots needed, at least 1.
            owner: who holds them; calling again with the same owner adds to what it holds.
            format: tag recorded on each block.

        Returns:
            The new blocks, in order.

        Raises:
            BlockPoolExhaustedError: when blocks are missing and the pool may not grow enough.
            ValueError: when `n_tokens` is not positive or `stream` is unknown.
        """
        source = self._stream(stream)
        n_tokens = _positive(n_tokens)
        n_blocks = -(-n_tokens // self._size)
        with self._lock:
            if n_blocks > len(source.ids):
                self._ensure({source.name: n_blocks}, owner)
            return self._check_out(source, n_blocks, n_tokens, owner, format)

    def allocate_many(
        self, requests: Sequence[tuple[str, int]], owner: int, format: str = "fp16"
    ) -> list[list[Block]]:
        """Check out blocks for several (stream, n_tokens) at once: all of them or none.

        Returns:
            The blocks of each request, as `allocate` would give them.

        Raises:
            BlockPoolExhaustedError: when the requests together cannot be met.
            ValueError: when a request is not valid.
        """
        wanted = [(self._stream(stream), _positive(tokens)) for stream, tokens in requests]
        need: dict[str, int] = {}
        for source, tokens in wanted:
            need[source.name] = need.get(source.name, 0) - (-tokens // self._size)
        with self._lock:
            self._ensure(need, owner)
            return [
                self._check_out(source, -(-tokens // self._size), tokens, owner, format)
                for source, tokens in wanted
            ]

    def free(self, blocks: Iterable[Block]) -> None:
        """Return blocks to the free list of their stream.

        Raises:
            ValueError: when a block is not checked out from this pool (freed already, given
                twice, or of another pool). Nothing is freed then.
        """
        blocks = list(blocks)
        with self._lock:
            held_by = self._held
            for block in blocks:
                held = held_by.get(block.owner)
                if held is None or held.get(block.block_id) is not block:
                    raise ValueError(
                        f"block {block.block_id} is not checked out from this pool (freed "
                        "already, or from another pool); free each block once, where it came from"
                    )
            if len(blocks) > 1 and len({block.block_id for block in blocks}) < len(blocks):
                raise ValueError("a block is given twice in one free(); pass each block once")
            for block in blocks:
                owner = block.owner
                held = held_by[owner]
                del held[block.block_id]
                if not held:
                    del held_by[owner]
            self._take_back(blocks)

    def free_all(self, owner: int) -> None:
        """Return every block of `owner` and end its claim; an unknown owner is no error."""
        with self._lock:
            self._registered.discard(owner)
            held = self._held.pop(owner, None)
            if held:
                self._take_back(held.values())

    def shrink(self, stream: str, target_free: int) -> int:
        """Retire free blocks of `stream` for good until `target_free` are left.

        Blocks in use are never touched; a retired id never comes back. The blocks unused for
        longest go first.

        Returns:
            Blocks retired; 0 when no more than `target_free` are free.

        Raises:
            ValueError: when `target_free` is negative or `stream` is unknown.
        """
        source = self._stream(stream)
        if target_free < 0:
            raise ValueError(f"target_free={target_free}: keep 0 or more free blocks")
        with self._lock:
            retired = len(source.ids) - target_free
            if retired <= 0:
                return 0
            del source.ids[:retired]
            source.fresh = max(0, source.fresh - retired)
            self._stats.n_blocks -= retired
            self._stats.n_retired += retired
            self.history.append(self._snapshot())
            return retired

    def mark_used(self, block: Block, n_used: int) -> None:
        """Set how many slots of `block` are occupied and keep the fragmentation count true.

        A block that is no longer checked out gets the number but does not count.

        Raises:
            ValueError: when `n_used` is outside 0..block_size.
        """
        size = self._size
        if not 0 <= n_used <= size:
            raise ValueError(f"n_used={n_used} is outside 0..{size}, the slots of one block")
        with self._lock:
            block.n_used = n_used
            held = self._held.get(block.owner)
            if held is not None and held.get(block.block_id) is block:
                if 0 < n_used < size:
                    self._part.add(block.block_id)
                else:
                    self._part.discard(block.block_id)

    # ---- questions --------------------------------------------------------------------------

    def blocks_for(self, owner: int) -> list[Block]:
        """Blocks that `owner` holds, in allocation order."""
        with self._lock:
            return list(self._held.get(owner, {}).values())

    def n_free(self, stream: str = "k") -> int:
        """Free blocks of `stream`.

        Raises:
            ValueError: when `stream` is unknown.
        """
        source = self._stream(stream)
        with self._lock:
            return len(source.ids)

    def capacity(self) -> int | None:
        """Most blocks the pool can ever have in use, growth included; None is no limit."""
        with self._lock:
            return (
                self.config.max_blocks if self.config.grow_on_exhaustion else self._stats.n_blocks
            )

    def layout(self) -> PoolLayout:
        """Copy of all block ids by state, for pictures and storage upkeep; O(blocks)."""
        with self._lock:
            free: list[int] = []
            for source in self._streams.values():
                free += source.ids
            held = {owner: list(of) for owner, of in self._held.items() if owner is not None}
            return PoolLayout(free, held, set(self._part), self._next_id)

    # ---- inside the lock --------------------------------------------------------------------

    def _stream(self, stream: str) -> FreeList:
        source = self._alias.get(stream)
        if source is None:
            raise ValueError(f"stream {stream!r} is unknown; use one of {sorted(self._alias)}")
        return source

    def _ensure(self, need: dict[str, int], owner: int) -> None:
        """Grow so that each stream has `need` free blocks, or raise with nothing changed."""
        short = {
            name: blocks - len(self._streams[name].ids)
            for name, blocks in need.items()
            if blocks > len(self._streams[name].ids)
        }
        missing = sum(short.values())
        if not missing:
            return
        limit = self.config.max_blocks
        stats = self._stats
        grows = self.config.grow_on_exhaustion
        if not grows or (limit is not None and stats.n_blocks + missing > limit):
            stats.n_exhausted += 1
            self.history.append(self._snapshot())
            asked = ", ".join(
                f"{blocks} blocks of stream {name!r} ({len(self._streams[name].ids)} free)"
                for name, blocks in need.items()
            )
            rule = f"it may grow to {limit} blocks" if grows else "it may not grow"
            raise BlockPoolExhaustedError(
                f"owner {owner} asked for {asked} of a pool of {stats.n_blocks}; {rule}. "
                "Free blocks of finished requests, or make the pool larger"
            )
        for name, blocks in short.items():
            source = self._streams[name]
            stop = self._next_id + blocks
            source.ids[:0] = range(stop - 1, self._next_id - 1, -1)
            source.fresh += blocks
            self._next_id = stop
        stats.n_blocks += missing
        stats.n_grown += missing
        self.history.append(self._snapshot())

    def _check_out(
        self, source: FreeList, n_blocks: int, n_tokens: int, owner: int, format: str
    ) -> list[Block]:
        size, ids, stats = self._size, source.ids, self._stats
        held = self._held.get(owner)  # first of all: an unhashable owner must change nothing
        name = source.name
        if held is None:
            held = self._held[owner] = {}
        last = n_tokens - (n_blocks - 1) * size
        if n_blocks == 1:  # what decoding asks for, again and again
            block_id = ids.pop()
            out = [Block(block_id, name, format, last, owner, True)]
            held[block_id] = out[0]
        else:
            taken = ids[: -n_blocks - 1 : -1]
            del ids[-n_blocks:]
            out = [Block(block_id, name, format, size, owner, True) for block_id in taken]
            out[-1].n_used = last
            held.update(zip(taken, out, strict=True))
        if last < size:
            self._part.add(out[-1].block_id)
        left = len(ids)
        if source.fresh > left:
            stats.n_reused += n_blocks - (source.fresh - left)
            source.fresh = left
        else:
            stats.n_reused += n_blocks
        in_use = stats._in_use = stats._in_use + n_blocks
        if in_use > stats.peak_blocks_in_use:
            stats.peak_blocks_in_use = in_use
        stats.n_allocations += 1
        if stats.n_allocations % HISTORY_EVERY == 1:
            self.history.append(self._snapshot())
        return out

    def _take_back(self, blocks: Iterable[Block]) -> None:
        """Put blocks that were removed from their owner back on the free lists."""
        streams, part = self._streams, self._part
        n_blocks = 0
        for block in blocks:
            block_id = block.block_id
            streams[block.stream].ids.append(block_id)
            if block_id in part:
                part.discard(block_id)
            block.owner = None
            block.n_used = 0
            n_blocks += 1
        if n_blocks:
            self._stats._in_use -= n_blocks
            self._stats.n_frees += 1

    def _snapshot(self) -> AllocationStats:
        self._stats._fragmented_count = len(self._part)
        return self._stats.snapshot()


def _positive(n_tokens: int) -> int:
    n_tokens = index(n_tokens)
    if n_tokens <= 0:
        raise ValueError(f"n_tokens={n_tokens}: ask for at least 1 token slot")
    return n_tokens
