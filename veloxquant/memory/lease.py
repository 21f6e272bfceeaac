"""What one request may hold: a lease of blocks that follows its tokens, and promises of blocks."""

import threading
from collections.abc import Sequence
from types import TracebackType

from veloxquant.memory.block import Block
from veloxquant.memory.block_pool import BlockPoolAllocator


class Lease:
    """Keep enough blocks of a pool checked out to cover a number of tokens.

    With several streams, each of them covers the tokens, all or nothing. Blocks that somebody
    else freed by `pool.free_all(owner)` are noticed and charged again by the next `charge`.
    Thread-safe; usable as a context manager that releases at the end.

    Args:
        pool: where the blocks come from.
        owner: whom they are checked out to; None draws a fresh id from the pool.
        stream: stream to charge, or several.
        format: tag recorded on the blocks.
    """

    def __init__(
        self,
        pool: BlockPoolAllocator,
        owner: int | None = None,
        stream: str | Sequence[str] = "kv",
        format: str = "fp16",
    ) -> None:
        self.pool = pool
        self.owner = pool.new_owner() if owner is None else owner
        self.format = format
        self._held: dict[str, list[Block]] = {}
        for name in [stream] if isinstance(stream, str) else stream:
            pool.n_free(name)  # an unknown stream is refused here, not in the middle of a request
            self._held[name] = []
        self._tokens = 0
        self._released = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Lease(owner={self.owner}, tokens={self.tokens}, blocks={self.blocks})"

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def tokens(self) -> int:
        """Tokens covered."""
        return self._tokens

    @property
    def blocks(self) -> int:
        """Blocks held over all streams."""
        return sum(len(blocks) for blocks in self._held.values())

    @property
    def is_released(self) -> bool:
        """Whether `release` was called."""
        return self._released

    def covers(self, tokens: int) -> bool:
        """Whether `tokens` tokens are charged and nobody freed their blocks over our head."""
        return tokens <= self._tokens and all(
            blocks[0].owner is not None and blocks[-1].owner is not None
            for blocks in self._held.values()
            if blocks
        )

    def charge(self, tokens: int) -> None:
        """Make the lease cover `tokens` tokens in all; fewer than it covers already is no change.

        Args:
            tokens: tokens to cover, counted from the start of the request.

        Raises:
            BlockPoolExhaustedError: when a block is missing; the lease is as before.
            RuntimeError: when the lease was released.
        """
        with self._lock:
            if self._released:
                raise RuntimeError(
                    f"the lease of owner {self.owner} was released; open a new one to charge again"
                )
            self._forget_lost()
            tokens = max(tokens, self._tokens)
            size = self.pool.config.block_size
            missing = [
                (name, tokens - len(blocks) * size)
                for name, blocks in self._held.items()
                if len(blocks) * size < tokens
            ]
            if missing:
                parts = self.pool.allocate_many(missing, self.owner, self.format)
                for (name, _), new in zip(missing, parts, strict=True):
                    self._mark(self._held[name], self._tokens, tokens)
                    self._held[name] += new
            elif tokens > self._tokens:
                for blocks in self._held.values():
                    self._mark(blocks, self._tokens, tokens)
            self._tokens = tokens

    def shrink(self, tokens: int) -> int:
        """Give back the blocks beyond `tokens` tokens; the lease stays open.

        Returns:
            Blocks given back.

        Raises:
            ValueError: when `tokens` is negative.
        """
        if tokens < 0:
            raise ValueError(f"tokens={tokens}: shrink to 0 or more tokens")
        with self._lock:
            return self._cut(tokens)

    def release(self) -> int:
        """Give back everything and close the lease; calling it again does nothing.

        Returns:
            Blocks given back.
        """
        with self._lock:
            self._released = True
            return self._cut(0)

    def _cut(self, tokens: int) -> int:
        self._forget_lost()
        if tokens >= self._tokens:
            return 0
        size = self.pool.config.block_size
        keep = -(-tokens // size)
        surplus = [block for blocks in self._held.values() for block in blocks[keep:]]
        if surplus:
            self.pool.free(surplus)
        for blocks in self._held.values():
            del blocks[keep:]
            if blocks:
                self.pool.mark_used(blocks[-1], tokens - (keep - 1) * size)
        self._tokens = tokens
        return len(surplus)

    def _mark(self, blocks: list[Block], before: int, after: int) -> None:
        """Fill the blocks that tokens `before` to `after` fall into, as far as they are held."""
        size = self.pool.config.block_size
        for i in range(before // size, min(len(blocks), -(-after // size))):
            self.pool.mark_used(blocks[i], min(size, after - i * size))

    def _forget_lost(self) -> None:
        """Drop references to blocks that were freed over our head."""
        for blocks in self._held.values():
            if blocks and (blocks[-1].owner is None or blocks[0].owner is None):
                blocks[:] = [block for block in blocks if block.owner is not None]


class Promises:
    """Count blocks promised to admitted requests, so that all of them can finish.

    Thread-safe. A promise reserves nothing in the pool; whoever admits a request asks here first
    and gives the promise back when the request ends.

    Args:
        pool: its capacity, growth included, is what can be promised.
    """

    def __init__(self, pool: BlockPoolAllocator) -> None:
        self._pool = pool
        self._promised = 0
        self._lock = threading.Lock()

    @property
    def promised(self) -> int:
        """Blocks promised now."""
        return self._promised

    def could_ever(self, n_blocks: int) -> bool:
        """Whether `n_blocks` would fit a pool that nobody else uses."""
        limit = self._pool.capacity()
        return limit is None or n_blocks <= limit

    def try_promise(self, n_blocks: int, held_outside: int = 0) -> bool:
        """Promise `n_blocks` if they fit beside all other promises.

        Args:
            n_blocks: most blocks the request will hold.
            held_outside: blocks checked out under no promise, such as kept prompts.

        Raises:
            ValueError: when a number is negative.
        """
        if n_blocks < 0 or held_outside < 0:
            raise ValueError(
                f"n_blocks={n_blocks}, held_outside={held_outside}: use 0 or more blocks"
            )
        limit = self._pool.capacity()
        with self._lock:
            if limit is not None and self._promised + held_outside + n_blocks > limit:
                return False
            self._promised += n_blocks
            return True

    def withdraw(self, n_blocks: int) -> None:
        """Give back a promise of `n_blocks`.

        Raises:
            ValueError: when more is given back than was promised.
        """
        with self._lock:
            if not 0 <= n_blocks <= self._promised:
                raise ValueError(
                    f"cannot withdraw {n_blocks} blocks, {self._promised} are promised; "
                    "withdraw each promise once, with the number it was made for"
                )
            self._promised -= n_blocks
