"""What one layer hands to others by hand: segments of tokens that wait until they were read.

Caches that share read one another's buffers in place and hand over nothing. This is for whoever
runs the functions of a method layer by layer.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from veloxquant.config.ranges import is_whole
from veloxquant.core.exceptions import QuantizerConfigError

T = TypeVar("T")


@dataclass
class _Waiting(Generic[T]):
    item: T
    nbytes: int
    readers: int


class Segments(Generic[T]):
    """Segments by group and first token; each goes when all its readers have it.

    `max_ctx` is the number of tokens that a group may reach.
    """

    def __init__(self, max_ctx: int) -> None:
        if not is_whole(max_ctx) or max_ctx < 1:
            raise QuantizerConfigError(
                f"max_ctx={max_ctx!r} is not possible; it must be an integer of at least 1 token"
            )
        self.max_ctx = max_ctx
        self._waiting: dict[tuple[int, int], _Waiting[T]] = {}
        self._ends: dict[int, int] = {}

    def put(
        self, group_id: int, token_start: int, n_tokens: int, item: T, nbytes: int, readers: int
    ) -> None:
        """Keep a segment of `nbytes` bytes for `readers` readings; none of them keeps nothing.

        Raises:
            QuantizerConfigError: when it ends beyond `max_ctx`.
            ValueError: for a negative place, no tokens, or a negative number of readers.
        """
        self.reach(group_id, token_start, n_tokens)
        if not is_whole(readers) or readers < 0:
            raise ValueError(
                f"n_readers={readers!r} is not possible; it must be the number of layers that "
                f"read, an integer from 0 on"
            )
        self._waiting.pop((group_id, token_start), None)
        if readers:
            self._waiting[group_id, token_start] = _Waiting(item, nbytes, readers)

    def reach(self, group_id: int, token_start: int, n_tokens: int) -> None:
        """Note that a group has tokens [token_start, token_start + n_tokens).

        Raises:
            QuantizerConfigError: when they end beyond `max_ctx`.
            ValueError: for a negative place or no tokens.
        """
        whole = is_whole(token_start) and is_whole(n_tokens)
        if not whole or token_start < 0 or n_tokens < 1:
            raise ValueError(
                f"token_start={token_start!r} and n_tokens={n_tokens!r} are no segment; "
                f"it starts at 0 or later and has at least 1 token, both integers"
            )
        end = token_start + n_tokens
        if end > self.max_ctx:
            raise QuantizerConfigError(
                f"a segment of group {group_id} ends at token {end}, and the coordinator was made "
                f"for max_ctx={self.max_ctx}; make it with a larger max_ctx"
            )
        self._ends[group_id] = max(end, self._ends.get(group_id, 0))

    def take(self, group_id: int, token_start: int) -> T | None:
        """One reading of a segment; None where none waits."""
        waiting = self._waiting.get((group_id, token_start))
        if waiting is None:
            return None
        waiting.readers -= 1
        if waiting.readers == 0:
            del self._waiting[group_id, token_start]
        return waiting.item

    def end(self, group_id: int) -> int:
        """The token after the last one that a group has."""
        return self._ends.get(group_id, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the segments that wait."""
        return sum(waiting.nbytes for waiting in self._waiting.values())

    def clear(self) -> None:
        """Forget everything."""
        self._waiting.clear()
        self._ends.clear()
