"""Counters of a block pool and their Prometheus text."""

import re
from copy import copy
from dataclasses import dataclass, field

_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass
class AllocationStats:
    """Count what a `BlockPoolAllocator` did since it was made.

    Attributes:
        n_blocks: blocks managed now.
        n_allocations: `allocate()` calls that succeeded.
        n_frees: `free()` and `free_all()` calls that returned at least one block.
        n_reused: blocks handed out that had been handed out before.
        n_exhausted: allocations refused for want of free blocks.
        n_grown: blocks added by growth on exhaustion.
        n_retired: blocks removed for good by `shrink()`.
        peak_blocks_in_use: most blocks checked out at one time.
    """

    n_blocks: int
    n_allocations: int = 0
    n_frees: int = 0
    n_reused: int = 0
    n_exhausted: int = 0
    n_grown: int = 0
    n_retired: int = 0
    peak_blocks_in_use: int = 0
    _fragmented_count: int = 0
    _in_use: int = field(default=0, init=False, repr=False)

    def blocks_in_use(self) -> int:
        """Blocks checked out now."""
        return self._in_use

    def fragmentation(self) -> float:
        """Share of managed blocks that are partly filled: neither empty nor full, 0.0 to 1.0."""
        return self._fragmented_count / self.n_blocks if self.n_blocks else 0.0

    def snapshot(self) -> "AllocationStats":
        """Return an independent copy."""
        return copy(self)

    def to_prometheus(self, prefix: str = "veloxquant_block_pool") -> str:
        """Render as Prometheus text exposition format, newline-terminated.

        Args:
            prefix: start of every metric name.

        Raises:
            ValueError: when `prefix` cannot start a metric name.
        """
        if not _METRIC_NAME.fullmatch(prefix):
            raise ValueError(
                f"metric prefix {prefix!r} is not valid; use letters, digits, '_' and ':', "
                "not starting with a digit"
            )
        rows = (
            ("blocks", "gauge", "Blocks managed by the pool.", self.n_blocks),
            ("blocks_in_use", "gauge", "Blocks checked out now.", self.blocks_in_use()),
            (
                "peak_blocks_in_use",
                "gauge",
                "Most blocks checked out at one time.",
                self.peak_blocks_in_use,
            ),
            (
                "fragmentation_ratio",
                "gauge",
                "Partly filled blocks as a share of all blocks.",
                self.fragmentation(),
            ),
            ("allocations_total", "counter", "Successful allocations.", self.n_allocations),
            ("frees_total", "counter", "Calls that returned blocks.", self.n_frees),
            ("reused_total", "counter", "Blocks handed out again.", self.n_reused),
            ("exhausted_total", "counter", "Allocations refused.", self.n_exhausted),
            ("grown_total", "counter", "Blocks added on exhaustion.", self.n_grown),
            ("retired_total", "counter", "Blocks removed by shrinking.", self.n_retired),
        )
        return "".join(
            f"# HELP {prefix}_{name} {text}\n"
            f"# TYPE {prefix}_{name} {kind}\n"
            f"{prefix}_{name} {value}\n"
            for name, kind, text, value in rows
        )
