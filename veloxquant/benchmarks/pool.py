"""How fast the block pool is: `python -m veloxquant.benchmarks.pool`."""

import time
from collections.abc import Callable

from veloxquant.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant.memory.cells import run_length_cells

PAIRS = 20_000
ROUNDS = 7


def run() -> list[dict[str, str | float]]:
    """Measure on this thread, best of seven.

    Returns:
        Rows with `case`, `value` and `unit`.
    """
    return [
        {"case": "allocate + free, one block", "value": PAIRS / _pairs(), "unit": "pairs/s"},
        {"case": "free_all of 4,096 blocks", "value": 1e3 * _free_all(4_096), "unit": "ms"},
        {"case": "free_all of 16,384 blocks", "value": 1e3 * _free_all(16_384), "unit": "ms"},
        {"case": "cells of 100,000 blocks", "value": 1e3 * _cells(100_000), "unit": "ms"},
    ]


def table(rows: list[dict[str, str | float]]) -> str:
    """Render the rows of `run` as text."""
    return "\n".join(f"{row['case']:<32} {row['value']:>12,.2f} {row['unit']}" for row in rows)


def _best(work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    seconds = []
    for _ in range(ROUNDS):
        prepare()
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def _pairs() -> float:
    pool = BlockPoolAllocator()

    def work() -> None:
        for _ in range(PAIRS):
            pool.free(pool.allocate("k", 16, 1))

    return _best(work)


def _free_all(n_blocks: int) -> float:
    pool = BlockPoolAllocator(PoolConfig(n_blocks=n_blocks, separate_kv=False))
    return _best(lambda: pool.free_all(1), lambda: pool.allocate("kv", n_blocks * 16, 1))


def _cells(n_blocks: int) -> float:
    pool = BlockPoolAllocator(PoolConfig(n_blocks=n_blocks, separate_kv=False))
    for i in range(n_blocks // 5):
        pool.allocate("kv", 4 * 16 - 5, i % 40)
    return _best(lambda: run_length_cells(pool, 500))


if __name__ == "__main__":
    print(table(run()))
