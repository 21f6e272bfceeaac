"""One supervisor per user and state folder: a kernel lock that dies with its holder.

The lock is the truth; the process id written into the file is only a hint for people.
"""

import fcntl
import os
from pathlib import Path


class LockTakenError(RuntimeError):
    """Raised when another supervisor holds the lock; `pid` is who wrote the file last, or None."""

    def __init__(self, pid: int | None) -> None:
        super().__init__(f"another supervisor runs (pid {pid or 'unknown'})")
        self.pid = pid


class InstanceLock:
    """An exclusive lock on a file, held from `take` to `release` or the end of the process.

    The descriptor is not inheritable: a child that inherited it would keep the lock alive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def take(self) -> None:
        """Take the lock without waiting.

        Raises:
            LockTakenError: when another process holds it.
            OSError: when the file cannot be opened.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            fd = os.open(self.path, flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = _read_pid(fd)
                os.close(fd)
                raise LockTakenError(pid) from None
            if _is_at(fd, self.path):
                break
            os.close(fd)  # the file was replaced between opening and locking
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Give the lock back; the file stays, since deleting it would let two hold it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _is_at(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None
