"""A window around a cache that is fed vector by vector, under its documented name."""

from __future__ import annotations

from collections import deque
from typing import Any

from veloxquant.cache.standalone import StandaloneCache
from veloxquant.core.abstractions import KVCache
from veloxquant.core.exceptions import QuantizerConfigError


class SlidingWindowKVCache(KVCache):
    """The newest `window_size` tokens of another cache; what it holds equals a fresh cache's.

    Caches of this library forget their oldest token in place. Others are emptied and fed again
    from copies of the newest vectors, which are counted as held.

    Raises:
        QuantizerConfigError: for a window below one token, or a cache that holds tokens already.
    """

    def __init__(self, inner: KVCache, window_size: int) -> None:
        if not isinstance(window_size, int) or isinstance(window_size, bool) or window_size < 1:
            raise QuantizerConfigError(
                f"window_size={window_size!r} is not possible; it must be an integer of at least 1"
            )
        if isinstance(inner, StandaloneCache) and len(inner):
            raise QuantizerConfigError(
                f"the inner cache holds {len(inner)} tokens already; wrap an empty one"
            )
        self.inner, self.window_size = inner, window_size
        self._keys: deque[Any] = deque(maxlen=window_size)
        self._values: deque[Any] = deque(maxlen=window_size)
        self._counts = [0, 0]

    def append_key(self, k: Any) -> None:
        """Append a key (d,), giving up the oldest token when its value has come."""
        self._append(0, k)

    def append_value(self, v: Any) -> None:
        """Append a value (d,), giving up the oldest token when its key has come."""
        self._append(1, v)

    def attend(self, q: Any) -> Any:
        """Attention of a query (d,) with the tokens of the window."""
        return self.inner.attend(q)

    def memory_bytes(self) -> int:
        """Bytes held by the inner cache and by the copies it is fed from."""
        copies = sum(getattr(x, "nbytes", 0) for x in (*self._keys, *self._values))
        return self.inner.memory_bytes() + copies

    def reset(self) -> None:
        """Forget every token."""
        self.inner.reset()
        self._keys.clear()
        self._values.clear()
        self._counts = [0, 0]

    def __len__(self) -> int:
        """Tokens held."""
        return max(self._counts)

    def _append(self, side: int, x: Any) -> None:
        (self.inner.append_key, self.inner.append_value)[side](x)
        self._counts[side] += 1
        if not isinstance(self.inner, StandaloneCache):
            (self._keys, self._values)[side].append(x)
        if self._counts[0] != self._counts[1] or self._counts[0] <= self.window_size:
            return
        gone = self._counts[0] - self.window_size
        self._counts = [self.window_size, self.window_size]
        if isinstance(self.inner, StandaloneCache):
            self.inner.drop_oldest(gone)
            return
        self.inner.reset()
        for k, v in zip(self._keys, self._values, strict=True):
            self.inner.append(k, v)
