"""Heaps: the largest first, and the loudest channels of a changing set."""

import heapq
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class MaxHeap(Generic[T]):
    """Binary heap of (priority, value), the largest priority first; equals in order of arrival."""

    def __init__(self) -> None:
        self._items: list[tuple[float, int, T]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._items)

    def push(self, priority: float, value: T) -> None:
        """Add a value."""
        heapq.heappush(self._items, (-priority, next(self._arrivals), value))

    def pop(self) -> tuple[float, T]:
        """Remove and return the first.

        Raises:
            IndexError: when the heap is empty.
        """
        priority, _, value = heapq.heappop(self._items)
        return -priority, value

    def peek(self) -> tuple[float, T]:
        """Return the first and leave it.

        Raises:
            IndexError: when the heap is empty.
        """
        priority, _, value = self._items[0]
        return -priority, value


class SortedChannelIndex:
    """Channels by magnitude; entries that were overtaken are dropped when they come up."""

    _LEAST = 64

    def __init__(self) -> None:
        self._magnitude: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._magnitude)

    def insert(self, channel_idx: int, magnitude: float) -> None:
        """Add a channel, or give it another magnitude."""
        if self._magnitude.get(channel_idx) == magnitude:
            return  # it is in the heap already
        self._magnitude[channel_idx] = magnitude
        heapq.heappush(self._heap, (-magnitude, channel_idx))
        if len(self._heap) > max(self._LEAST, 2 * len(self._magnitude)):
            self._heap = [(-value, channel) for channel, value in self._magnitude.items()]
            heapq.heapify(self._heap)

    def update(self, channel_idx: int, new_magnitude: float) -> None:
        """Give a channel another magnitude.

        Raises:
            KeyError: for a channel that was never inserted.
        """
        if channel_idx not in self._magnitude:
            raise KeyError(f"channel {channel_idx} was never inserted")
        self.insert(channel_idx, new_magnitude)

    def top_k(self, k: int) -> list[int]:
        """The `k` loudest channels or all there are, loudest first, ties to the lowest."""
        found: list[int] = []
        taken: list[tuple[float, int]] = []
        seen: set[int] = set()
        while self._heap and len(found) < k:
            entry = heapq.heappop(self._heap)
            negative, channel = entry
            if channel in seen or self._magnitude.get(channel) != -negative:
                continue  # overtaken
            seen.add(channel)
            found.append(channel)
            taken.append(entry)
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return found
