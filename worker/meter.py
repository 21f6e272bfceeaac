"""What this process uses, by the numbers that the system judges it by."""

import sys
from typing import NamedTuple

import psutil

SOFT_SHARE = 0.9
"""Share of the limit above which no new request is taken."""
_CACHE_SHARE = 0.1
_MIN_CACHE = 64 << 20


class Reading(NamedTuple):
    """Bytes: what the system counts, and MLX's own counters."""

    footprint: int
    active: int
    peak: int
    cache: int

    @property
    def judged(self) -> int:
        """The number that the limit applies to.

        MLX's count and the system's miss different things, so the larger one.
        """
        return max(self.footprint, self.active + self.cache)


class Meter:
    """Reads memory and compares it with the limit.

    On macOS the resident size misses Metal's buffers, so the unique set size is read there, which
    the kernel takes from the same ledger as the footprint of Activity Monitor.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._process = psutil.Process()

    def footprint(self) -> int:
        """Bytes that the system counts for this process."""
        if sys.platform == "darwin":
            return self._process.memory_full_info().uss
        return self._process.memory_info().rss

    def read(self) -> Reading:
        """Read everything."""
        import mlx.core as mx

        return Reading(
            self.footprint(), mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory()
        )

    def bound_buffer_cache(self, *, on_cpu: bool) -> None:
        """Let MLX keep at most a tenth of the limit in freed buffers, and none on the CPU.

        A kept buffer is handed out for any array that is up to two pages smaller (to less than half
        the buffer), and a cache that grows into such buffers holds more than it asked for: tens of
        percent with many small packed arrays. The CPU's own allocator is as fast without.
        """
        import mlx.core as mx

        kept = 0 if on_cpu else max(_MIN_CACHE, int(_CACHE_SHARE * self.limit))
        mx.set_cache_limit(kept)

    def is_soft(self, reading: Reading) -> bool:
        """Whether new requests should wait for better times."""
        return reading.judged > SOFT_SHARE * self.limit

    def is_hard(self, reading: Reading) -> bool:
        """Whether something must go now."""
        return reading.judged > self.limit
