"""What a cache hands to the model instead of arrays: shape, type, and the way back to the cache."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx


class Attending(Protocol):
    """A cache that computes attention itself."""

    def attend(
        self,
        queries: mx.array,
        view: CacheView,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
        *,
        owner: bool,
    ) -> mx.array:
        """Attention of the queries with everything the view stands for."""
        ...


class CacheView:
    """Stands for the keys or the values of one call; not an array, so that misuse fails loudly.

    `shape` is (B, H, T, D) with all T tokens held. The first attention on a pair of views is the
    layer's own and may feed a scorer; layers that share another layer's keys attend again.
    """

    __slots__ = ("_unread", "cache", "dtype", "is_key", "shape")

    def __init__(
        self, cache: Attending, shape: tuple[int, ...], dtype: mx.Dtype, *, is_key: bool, own: bool
    ) -> None:
        self.cache = cache
        self.shape = shape
        self.dtype = dtype
        self.is_key = is_key
        self._unread = own

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def attend(
        self,
        queries: mx.array,
        values: Any,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention through the cache that made this view.

        Raises:
            TypeError: when the values are not the view that was made together with these keys.
        """
        if not isinstance(values, CacheView) or values.cache is not self.cache or values.is_key:
            raise TypeError("keys are a cache view; values must be the view of the same cache")
        owner, self._unread = self._unread, False
        return self.cache.attend(queries, self, scale, mask, sinks, owner=owner)
