"""The newest queries of a layer, kept for scores that read them later."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from veloxquant.core.exceptions import CacheStateError

_LEFT_IN_PLACE = 16 << 10
"""`mx.contiguous` leaves a slice in a buffer that is larger than the slice by at most this."""


class QueryRing:
    """Up to `size` of the newest queries, (B, Hq, m, D) in time order; None for all of them."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.queries: mx.array | None = None
        self.scale = 1.0
        self.sinks: mx.array | None = None
        """Logits (Hq,) fp32 that the model adds to the denominators of these queries."""

    @property
    def length(self) -> int:
        """Queries held."""
        return 0 if self.queries is None else self.queries.shape[2]

    def push(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> None:
        """Add the queries (B, Hq, L, D) of the newest tokens."""
        if sinks is not None and self.sinks is None:
            # Numbers of its own: a ring must not keep the model alive.
            self.sinks = sinks.reshape(-1).astype(mx.float32) + 0.0
        ring = queries if self.size is None else queries[:, :, -self.size :]
        room = None if self.size is None else self.size - ring.shape[2]
        if self.queries is not None and room != 0:
            older = self.queries if room is None else self.queries[:, :, -room:]
            ring = mx.concatenate([older, ring], axis=2)
        self.scale = scale
        self.hold(ring)

    def hold(self, queries: mx.array) -> None:
        """Hold exactly these; a slice would keep all queries of its chunk or batch alive."""
        if not queries.shape[2]:
            self.queries = None
        elif queries.nbytes <= _LEFT_IN_PLACE:
            self.queries = mx.concatenate([queries[..., :1], queries[..., 1:]], axis=-1)
        else:
            self.queries = mx.contiguous(queries)

    def rewind(self, n: int) -> None:
        """Forget the newest `n`."""
        if self.queries is not None and n:
            self.hold(self.queries[:, :, : max(0, self.length - n)])

    def forget(self) -> None:
        """Hold nothing."""
        self.queries = self.sinks = None

    def arrays(self) -> Iterator[mx.array]:
        """What is held."""
        if self.queries is not None:
            yield self.queries
        if self.sinks is not None:
            yield self.sinks

    def saved(self) -> list[Any]:
        """The queries, their factor and their sinks."""
        return [self.queries, self.scale, self.sinks]

    def restore(self, saved: list[Any]) -> None:
        """Take back what `saved` gave.

        Raises:
            CacheStateError: when it is not queries of at most `size` tokens, or not their sinks.
        """
        queries, scale, sinks = saved
        if queries is not None and (
            queries.ndim != 4 or (self.size is not None and queries.shape[2] > self.size)
        ):
            raise CacheStateError(f"{queries.shape} are not the newest queries of this cache")
        heads = None if queries is None else queries.shape[1]
        if sinks is not None and (sinks.ndim != 1 or heads not in (None, sinks.size)):
            raise CacheStateError(f"{sinks.shape} are not the sinks of {heads} query heads")
        self.queries, self.scale, self.sinks = queries, float(scale), sinks
