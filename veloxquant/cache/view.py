"""What a cache hands to the model instead of arrays: shape, type, and the way back to the cache."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from veloxquant.core.exceptions import CacheStateError


class AttentionCall(NamedTuple):
    """What one layer asks of a cache that computes attention itself."""

    queries: mx.array
    """(B, Hq, L, D)."""
    view: CacheView
    """The keys to attend to, as the cache gave them."""
    scale: float
    """Factor on the scores."""
    mask: mx.array | str | None
    """None, "causal", or an array that broadcasts to (B, Hq, L, T)."""
    sinks: mx.array | None
    """(Hq,) logits that join the denominator only."""
    owner: bool
    """Whether the layer's own attention asks, which may feed a scorer; not one that borrows."""

    @property
    def length(self) -> int:
        """Tokens L that ask."""
        return self.queries.shape[2]

    def current(self, rows: int) -> bool:
        """Whether the view stands for the `rows` tokens that its cache holds now."""
        return self.view.shape[2] == rows

    def check(self, rows: int) -> None:
        """Refuse a view of another state than that of `rows` tokens.

        Raises:
            CacheStateError: when the cache moved on since the view was made.
        """
        if not self.current(rows):
            raise CacheStateError(
                f"the view stands for {self.view.shape[2]} tokens, the cache holds {rows} now"
            )

    def of_one_token(self, rows: int) -> bool:
        """Whether one token asks, of all `rows` held: then a method may read a part of them."""
        return self.current(rows) and self.length == 1 and not isinstance(self.mask, mx.array)


class Attending(Protocol):
    """A cache that computes attention itself."""

    def attend(self, call: AttentionCall) -> mx.array:
        """Attention (B, Hq, L, D) of the queries with everything the view stands for."""
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
        return self.cache.attend(AttentionCall(queries, self, scale, mask, sinks, owner))
