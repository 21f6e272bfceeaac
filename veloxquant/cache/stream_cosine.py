"""The mean cosine that a layer gathers over a prompt, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from veloxquant.core.exceptions import CacheStateError


class StreamCosine:
    """Sum of the cosines of tokens, and their number."""

    def __init__(self) -> None:
        self.total: mx.array | None = None
        self.tokens = 0

    def add(self, cosines: mx.array) -> mx.array:
        """Take those of new tokens, (B, L) fp32, B sequences counting as one; returns the sum."""
        own = cosines.mean(axis=0).sum()
        self.total = own if self.total is None else self.total + own
        self.tokens += cosines.shape[1]
        return self.total

    def mean(self, tokens: int) -> mx.array | None:
        """The mean over `tokens` tokens if it is just those that were seen, a scalar."""
        if self.total is None or self.tokens != tokens:
            return None
        return self.total / tokens

    def rewind(self, n: int) -> None:
        """Forget `n` tokens: the mean of the others is taken to be the same."""
        left = max(0, self.tokens - n)
        self.total = self.total * (left / self.tokens) if self.total is not None and left else None
        self.tokens = left

    def forget(self) -> None:
        """Start anew."""
        self.total, self.tokens = None, 0

    def arrays(self) -> Iterator[mx.array]:
        """The sum."""
        if self.total is not None:
            yield self.total

    def saved(self) -> list[Any]:
        """Sum and number."""
        return [self.total, self.tokens]

    def restore(self, saved: list[Any]) -> None:
        """Take back what `saved` gave.

        Raises:
            CacheStateError: when it is no sum of cosines.
        """
        total, tokens = saved
        tokens = int(tokens)
        if (
            (total is None) != (tokens == 0)
            or tokens < 0
            or (total is not None and total.size != 1)
        ):
            raise CacheStateError(f"{total!r} is no sum of the cosines of {tokens} tokens")
        self.total, self.tokens = total, tokens
