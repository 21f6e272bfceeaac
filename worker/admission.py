"""Who may start: blocks are promised before a request runs, so that none runs dry half-way.

A request is promised prompt plus `max_tokens`. What cannot be promised waits in a bounded queue,
in order; past the bound clients are told to come back. What is promised is charged step by step,
so the pool shows what is held and not what might be.
"""

import threading
from collections import deque

from veloxquant.core.exceptions import BlockPoolExhaustedError
from veloxquant.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant.memory.cells import run_length_cells
from veloxquant.memory.lease import Lease, Promises
from veloxquant.supervisor.messages import PoolCells
from veloxquant.worker.jobs import Job

MAX_WAITING = 32
RETRY_SECONDS = 5
_MOST_RUNS = 500


class QueueFullError(RuntimeError):
    """Raised when a request can neither run nor wait."""


class Admission:
    """The queue, the promises and the charges.

    `offer`, `withdraw` and the counts may be used on any thread, the rest only on the engine's.

    Args:
        context: tokens that one request may come to.
        batch: requests that run side by side.
        block_size: tokens of all layers in a block.
    """

    def __init__(self, context: int, batch: int, block_size: int) -> None:
        self.block_size = block_size
        self.batch = batch
        n_blocks = -(-context // block_size) * batch
        self.pool = BlockPoolAllocator(PoolConfig(block_size, n_blocks, separate_kv=False))
        self._promises = Promises(self.pool)
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._running = 0

    # ---- the queue --------------------------------------------------------------------------

    def offer(self, job: Job) -> None:
        """Put a request at the end of the queue.

        Raises:
            QueueFullError: when as many wait as may.
        """
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                raise QueueFullError(f"{MAX_WAITING} requests are waiting already")
            self._waiting.append(job)

    def withdraw(self, job_id: str) -> Job | None:
        """Take a waiting request out of the queue."""
        with self._lock:
            for job in self._waiting:
                if job.id == job_id:
                    self._waiting.remove(job)
                    return job
        return None

    def withdraw_first(self) -> Job | None:
        """Take the first waiting request out of the queue."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold a promise."""
        return self._running

    # ---- promises and charges ---------------------------------------------------------------

    def start_next(self) -> Job | None:
        """Promise blocks to the first in the queue; None when nobody waits or it must wait on."""
        with self._lock:
            if not self._waiting or self._running >= self.batch:
                return None
            if not self._promises.try_promise(self._blocks(self._waiting[0])):
                return None
            job = self._waiting.popleft()
            self._running += 1
        job.lease = Lease(self.pool, job.owner)
        return job

    def charge(self, job: Job, held: int, more: int) -> bool:
        """Charge the tokens a job holds and those of its next step; False when blocks run out.

        What an eviction gave up since the last charge goes back to the pool first.
        """
        assert job.lease is not None, job.id
        job.lease.shrink(held)
        try:
            job.lease.charge(held + more)
        except BlockPoolExhaustedError:
            return False
        return True

    def finish(self, job: Job) -> None:
        """Take back what a job holds and what it was promised."""
        if job.lease is None:
            return
        job.lease.release()
        job.lease = None
        self._promises.withdraw(self._blocks(job))
        with self._lock:
            self._running -= 1

    def _blocks(self, job: Job) -> int:
        return -(-job.most_tokens // self.block_size)

    # ---- pictures ---------------------------------------------------------------------------

    def cells(self) -> PoolCells:
        """The pool as runs of equal cells: full `#`, part filled `*`, free `.`."""
        stats = self.pool.stats
        runs = run_length_cells(self.pool, _MOST_RUNS)
        return PoolCells(
            block_size=self.block_size,
            blocks=stats.n_blocks,
            used=stats.blocks_in_use(),
            part=len(self.pool.layout().part),
            reused=stats.n_reused,
            exhausted=stats.n_exhausted,
            grown=stats.n_grown,
            peak=stats.peak_blocks_in_use,
            cells=runs,
        )
