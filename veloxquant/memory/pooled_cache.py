"""A vector-by-vector cache whose tokens are charged to a shared pool."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from veloxquant.core.abstractions import KVCache
from veloxquant.memory.block_pool import BlockPoolAllocator
from veloxquant.memory.lease import Lease

NO_OWNER_GIVEN = -1
_INTERFACE = ("append_key", "append_value", "attend", "memory_bytes", "reset")


class PooledKVCache(KVCache):
    """Charge a pool for the tokens of any `KVCache`, whose own storage stays as it is.

    A block is asked for only when the last one is full. When the wrapped cache drops tokens by
    itself (a sliding window), blocks it no longer needs go back. An append that fails, in the pool
    or in the wrapped cache, charges nothing. `release` returns exactly the blocks of this cache;
    the wrapped cache keeps its tokens, so another append charges for all of them again. Tokens it
    holds already when it is wrapped are charged by the first append, too.

    Args:
        inner: cache that does the compression.
        pool: pool to charge.
        owner: request the blocks are checked out to; -1 draws a fresh id from the pool.
        format: tag recorded on the blocks.

    Raises:
        TypeError: when `inner` lacks part of the `KVCache` interface; nothing is charged.
    """

    def __init__(
        self,
        inner: KVCache,
        pool: BlockPoolAllocator,
        owner: int = NO_OWNER_GIVEN,
        format: str = "fp16",
    ) -> None:
        missing = [name for name in _INTERFACE if not callable(getattr(inner, name, None))]
        if missing:
            raise TypeError(
                f"PooledKVCache cannot wrap {type(inner).__name__}: it has no "
                f"{', '.join(missing)}. Caches made for mlx-lm generation are charged by "
                "build_pooled_caches() instead"
            )
        self._inner = inner
        self._pool = pool
        self.owner = pool.new_owner() if owner == NO_OWNER_GIVEN else owner
        self._keys = Lease(pool, self.owner, "k", format)
        self._values = Lease(pool, self.owner, "v", format)
        self._n_keys = self._n_values = _length(inner) or 0

    def append_key(self, k: Any) -> None:
        """Charge and append a key, shape (d,), or several, shape (n, d).

        Raises:
            BlockPoolExhaustedError: when a block is missing; nothing is appended.
        """
        n = self._n_keys + _rows(k)
        _charged(self._keys, n, self._inner.append_key, k)
        self._n_keys = n

    def append_value(self, v: Any) -> None:
        """Charge and append a value, shape (d,), or several, shape (n, d).

        Raises:
            BlockPoolExhaustedError: when a block is missing; nothing is appended.
        """
        n = self._n_values + _rows(v)
        _charged(self._values, n, self._inner.append_value, v)
        self._n_values = n
        if self._n_keys == n:
            self._follow_inner()

    def append(self, k: Any, v: Any) -> None:
        """Append a key and its value; when the pool lacks a block for either, append neither.

        Raises:
            BlockPoolExhaustedError: when a block is missing; nothing is appended.
        """
        values_before = self._values.tokens
        with ExitStack() as undo:
            undo.callback(self._keys.shrink, self._keys.tokens)
            undo.callback(self._values.shrink, values_before)
            self._keys.charge(self._n_keys + _rows(k))
            self._values.charge(self._n_values + _rows(v))
            self.append_key(k)
            undo.pop_all()
            undo.callback(self._values.shrink, values_before)
            self.append_value(v)
            undo.pop_all()

    def attend(self, q: Any) -> Any:
        """Attention output of the wrapped cache for the query `q`, shape (d,)."""
        return self._inner.attend(q)

    def memory_bytes(self) -> int:
        """Bytes the wrapped cache holds."""
        return self._inner.memory_bytes()

    def release(self) -> None:
        """Return every block of this cache to the pool; the wrapped cache is not emptied."""
        self._keys.shrink(0)
        self._values.shrink(0)

    def n_blocks_held(self) -> int:
        """Blocks checked out to this cache, keys and values together."""
        return self._keys.blocks + self._values.blocks

    def reset(self) -> None:
        """Empty the wrapped cache and return every block."""
        self._inner.reset()
        self._n_keys = self._n_values = 0
        self.release()

    def __len__(self) -> int:
        """Tokens appended and still held."""
        return self._n_keys

    def _follow_inner(self) -> None:
        """Give back blocks of tokens that the wrapped cache has dropped by itself."""
        held = _length(self._inner)
        if held is not None and held < self._n_keys:
            self._n_keys = self._n_values = held
            self._keys.shrink(held)
            self._values.shrink(held)


def _length(cache: KVCache) -> int | None:
    """Tokens `cache` holds; None when it does not say."""
    try:
        return len(cache)
    except (TypeError, NotImplementedError):
        return None


def _rows(vectors: Any) -> int:
    shape = getattr(vectors, "shape", ())
    return int(shape[0]) if len(shape) == 2 else 1


def _charged(lease: Lease, tokens: int, append: Callable[[Any], None], vectors: Any) -> None:
    """Charge, append, and take the charge back when the append fails."""
    with ExitStack() as undo:
        undo.callback(lease.shrink, lease.tokens)
        lease.charge(tokens)
        append(vectors)
        undo.pop_all()
