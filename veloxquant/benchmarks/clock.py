"""Two clocks and fair turns: what every measurement of time here is made of.

Contenders take turns, each turn in an order that moves on by one, so that whatever else the machine
does hits all alike; they are compared turn by turn.

Two clocks are read: the wall's, and the processor time of this process, which does not count what
other programs took, but counts every thread of ours. On a CPU targets are judged by processor time:
a second thread makes nothing look faster there. On a GPU, where processor time means nothing, they
are judged by the wall's.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import mlx.core as mx
import numpy as np

T = TypeVar("T")


class Stopwatch:
    """Times of one contender, in seconds, an entry a turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.processor: list[float] = []

    def time(self, work: Callable[[], object]) -> None:
        """Do it, and note how long it took by both clocks."""
        start, busy = time.perf_counter(), time.process_time()
        work()
        self.seconds.append(time.perf_counter() - start)
        self.processor.append(time.process_time() - busy)

    def forget(self, turns: int) -> None:
        """Drop the first turns, which warmed up."""
        del self.seconds[:turns], self.processor[:turns]

    @property
    def judged(self) -> list[float]:
        """Times by the clock that counts here."""
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        return self.processor if on_cpu else self.seconds

    @property
    def milliseconds(self) -> float:
        """Median wall time of a turn."""
        return 1e3 * float(np.median(self.seconds))

    @property
    def judged_milliseconds(self) -> float:
        """Median time of a turn by the clock that counts here."""
        return 1e3 * float(np.median(self.judged))


def in_turns(contenders: Sequence[T], turns: int) -> Iterator[list[T]]:
    """The order of each turn; who comes first moves on."""
    for turn in range(turns):
        first = turn % len(contenders)
        yield [*contenders[first:], *contenders[:first]]


def median_ratio(times: Sequence[float], against: Sequence[float]) -> float:
    """Median over turns of one's times divided by the other's."""
    return float(np.median(np.array(times) / np.array(against)))
