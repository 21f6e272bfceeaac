"""A block, the size of a pool, and the free list of one stream."""

from dataclasses import dataclass
from typing import NamedTuple

from veloxquant.core.exceptions import QuantizerConfigError


@dataclass(frozen=True)
class PoolConfig:
    """Size and behave a `BlockPoolAllocator`.

    Attributes:
        block_size: token slots per block.
        n_blocks: blocks managed from the start.
        separate_kv: keep keys and values on free lists of their own. Keys get the extra block
            when `n_blocks` is odd.
        grow_on_exhaustion: add just enough blocks instead of refusing an allocation.
        max_blocks: most blocks over all streams that growth may reach; None is no limit. Ignored
            unless `grow_on_exhaustion`.

    Raises:
        QuantizerConfigError: when a size cannot work (a ValueError).
    """

    block_size: int = 16
    n_blocks: int = 1024
    separate_kv: bool = True
    grow_on_exhaustion: bool = False
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise QuantizerConfigError(
                f"block_size={self.block_size}: a block holds at least 1 token"
            )
        if self.n_blocks < 0:
            raise QuantizerConfigError(f"n_blocks={self.n_blocks}: use 0 or more blocks")
        limit = self.max_blocks if self.grow_on_exhaustion else None
        if limit is not None and limit < self.n_blocks:
            raise QuantizerConfigError(
                f"max_blocks={limit} is under n_blocks={self.n_blocks}; raise it or use None"
            )


@dataclass(slots=True, eq=False)
class Block:
    """One checked-out block; compares by identity.

    Every checkout makes a new object for its block id, so an old reference to a block that has
    moved on is recognised. After `free` the object has no owner and no used slots.

    Attributes:
        block_id: index into the backing storage; an id never changes its meaning.
        stream: "k" or "v", or "kv" when the pool has one free list.
        format: tag of the data stored, for example "fp16" or "int4".
        n_used: token slots occupied, up to the block size. Change it by `pool.mark_used`.
        owner: who holds the block; None once it is free.
        ever_allocated: whether this block id was handed out at least once.
    """

    block_id: int
    stream: str = "kv"
    format: str = "fp16"
    n_used: int = 0
    owner: int | None = None
    ever_allocated: bool = False


class PoolLayout(NamedTuple):
    """Copy of who holds which block id.

    Attributes:
        free: ids that nobody holds.
        held: ids by owner, in allocation order.
        part: ids that are partly filled.
        n_ids: ids ever made, retired ones included.
    """

    free: list[int]
    held: dict[int, list[int]]
    part: set[int]
    n_ids: int


class FreeList:
    """Free list of one stream: a stack whose lowest `fresh` ids were never handed out."""

    __slots__ = ("fresh", "ids", "name")

    def __init__(self, name: str, start: int, stop: int) -> None:
        self.name = name
        self.ids = list(range(stop - 1, start - 1, -1))
        self.fresh = stop - start
