"""The worker process: spawn it with its guard, watch it, signal and clear its whole group.

The group is led by the *guard*, a shell that waits for the end of a pipe only the supervisor
holds. However the supervisor dies, the pipe ends and the guard kills the group, worker and
grandchildren alike; that works on every platform, with nothing armed inside the worker. The
worker's own dead-man is the second line. While the guard is not reaped its process group id
cannot be reused, so signals never hit a stranger.
"""

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from veloxquant.supervisor.logs import LineSplitter

log = logging.getLogger(__name__)

GUARD = ("/bin/sh", "-c", 'trap "" TERM HUP INT; read _; kill -KILL 0')
WORKER_MODULE = "veloxquant.worker"
CLEAR_SECONDS = 1.0
LAST_READS = 64

ENVIRONMENT = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "OPENBLAS_NUM_THREADS"}
)
ENVIRONMENT_PREFIXES = ("LC_", "HF_", "VELOXQUANT_", "MLX_", "SSL_CERT", "XDG_")


def child_environment(given: dict[str, str]) -> dict[str, str]:
    """The allowed part of `given`, and what makes last words of a dying worker arrive."""
    kept = {
        name: value
        for name, value in given.items()
        if name in ENVIRONMENT or name.startswith(ENVIRONMENT_PREFIXES)
    }
    return kept | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def worker_command(module: str, link_fd: int) -> list[str]:
    """Command line of a worker, a module or (for tests) a file; the specification is not in it."""
    program = (module,) if module.endswith(".py") else ("-m", module)
    return [
        *(sys.executable, "-P", *program),
        *("--parent", str(os.getpid()), "--link", str(link_fd)),
    ]


class WorkerProcess:
    """One worker, its guard, its output and our end of its link.

    Create it in the main thread: the death signal of Linux fires when the thread that forked ends.
    """

    def __init__(
        self,
        *,
        module: str,
        listen: socket.socket,
        cwd: Path,
        on_line: Callable[[str], None],
    ) -> None:
        """Spawn.

        Raises:
            OSError: when the system refuses another process or descriptor.
        """
        ours, theirs = socket.socketpair()
        guard_read, self._guard_pipe = os.pipe()
        output, output_write = os.pipe()
        self._guard: subprocess.Popen[bytes] | None = None
        try:
            env = child_environment(dict(os.environ))
            self._guard = subprocess.Popen(
                GUARD,
                stdin=guard_read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=env,
                process_group=0,
            )
            self.group = self._guard.pid
            self.command = worker_command(module, theirs.fileno())
            self._proc = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                cwd=cwd,
                env=env,
                pass_fds=(theirs.fileno(), listen.fileno()),
                process_group=self.group,
                umask=0o077,
            )
        except OSError:
            ours.close()
            os.close(output)
            os.close(self._guard_pipe)
            if self._guard is not None:
                self._guard.kill()
                self._guard.wait()
            raise
        finally:
            theirs.close()
            os.close(guard_read)
            os.close(output_write)
        self.pid = self._proc.pid
        self.link = ours
        self._pump = OutputPump(output, on_line)

    async def wait(self) -> int:
        """Wait for the process to end, clear its group, and return its status.

        The end is seen through a process descriptor (or a waiting thread where there is none),
        never through its pipes, which a grandchild may hold open.
        """
        if hasattr(os, "pidfd_open"):
            await _readable(os.pidfd_open(self.pid))
        else:
            await asyncio.to_thread(self._proc.wait)
        status = self._proc.wait()
        await self._clear_group()
        return status

    def signal(self, kind: str) -> None:
        """`term` and `kill` go to the whole group, `stack` (SIGUSR1) to the worker alone.

        A worker can answer SIGUSR1 from its hello on.
        """
        with contextlib.suppress(ProcessLookupError):
            if kind == "stack":
                self._proc.send_signal(signal.SIGUSR1)
            else:
                os.killpg(self.group, signal.SIGTERM if kind == "term" else signal.SIGKILL)
                if kind == "kill":
                    os.kill(self.pid, signal.SIGKILL)

    async def _clear_group(self) -> None:
        """Kill what is left of the group, reap the guard, take in the last output."""
        assert self._guard is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, signal.SIGKILL)
        await asyncio.to_thread(self._guard.wait)
        os.close(self._guard_pipe)
        if not await asyncio.to_thread(self._pump.finish, CLEAR_SECONDS):
            log.warning("output of worker %d was not drained in time", self.pid)


class OutputPump:
    """Thread that takes a worker's raw output line by line, whatever our event loop does."""

    def __init__(self, fd: int, on_line: Callable[[str], None]) -> None:
        self._fd = fd
        self._on_line = on_line
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="worker-output", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> bool:
        """Take in what is there already, then end, even if someone still holds the pipe."""
        os.write(self._wake_write, b"x")
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        os.close(self._wake_write)
        os.close(self._wake_read)
        return True

    def _run(self) -> None:
        splitter = LineSplitter()
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        ended = last_round = False
        while not last_round:
            last_round = any(fd == self._wake_read for fd, _ in poll.poll())
            if last_round:
                os.set_blocking(self._fd, False)
            for _ in range(LAST_READS if last_round else 1):
                try:
                    data = b"" if ended else os.read(self._fd, 1 << 16)
                except BlockingIOError:
                    break
                if not data:
                    if not ended:
                        poll.unregister(self._fd)
                    ended = True
                    break
                self._take(splitter.feed(data))
        self._take(splitter.end())
        os.close(self._fd)

    def _take(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._on_line(line)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def _set() -> None:
        if not done.done():
            done.set_result(None)

    loop.add_reader(fd, _set)
    try:
        await done
    finally:
        loop.remove_reader(fd)
        os.close(fd)
