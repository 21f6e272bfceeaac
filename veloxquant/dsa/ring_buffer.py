"""A queue of fixed size that gives up its oldest item for a new one."""

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class RingBuffer(Generic[T]):
    """The newest `capacity` items, oldest first."""

    def __init__(self, capacity: int) -> None:
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise ValueError(f"capacity={capacity!r}; give a whole number of at least 1")
        self.capacity = capacity
        self._items: deque[T] = deque()

    def append(self, item: T) -> T | None:
        """Add an item; returns the one that had to leave, None while there was room."""
        left = self._items.popleft() if self.is_full() else None
        self._items.append(item)
        return left

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, idx: int) -> T:
        return self._items[idx]

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def is_full(self) -> bool:
        """Whether the next item makes another leave."""
        return len(self._items) == self.capacity

    def to_list(self) -> list[T]:
        """Items, oldest first."""
        return list(self._items)

    def to_stacked(self) -> Any:
        """Arrays stacked on a new first axis.

        Raises:
            ValueError: when there is nothing to stack.
        """
        import mlx.core as mx  # the buffer itself holds anything

        if not self._items:
            raise ValueError("an empty buffer cannot be stacked")
        items: list[Any] = list(self._items)
        return mx.stack([mx.array(item) for item in items])
