"""Files that appear whole or not at all.

A file is written beside its place, under a name that tells machine and process, and moved into it.
"""

import contextlib
import os
import platform
import re
import threading
import time
from pathlib import Path

_LONGEST_WRITE_S = 24 * 3600
"""No write takes as long, on whatever machine."""
_counter = iter(range(1 << 62))
_lock = threading.Lock()
_under_way: set[str] = set()
"""Names of the files that threads of this process write now."""


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file in one step, folders included; the umask narrows its permissions.

    What writers of the same file left behind when they were killed is removed.

    Args:
        path: the file.
        data: all that it will hold.
        mode: permissions of the file, whatever those of an older one were.

    Raises:
        OSError: when the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    with _lock:
        beside = path.with_name(f".{path.name}.{_machine()}.{os.getpid()}.{next(_counter)}.tmp")
        _under_way.add(beside.name)
    try:
        # open() honours the umask, which tempfile does not; "x" never follows what lies there
        with open(beside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        _under_way.discard(beside.name)


def _machine() -> str:
    """The name of this machine, as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", platform.node())[:40] or "-"


def _sweep(path: Path) -> None:
    """Remove the unfinished files of writers that run no more.

    A number tells nothing about a process of another machine or container that shares the folder:
    its files go by age.
    """
    name = re.escape(f".{path.name}.")
    unfinished = re.compile(name + r"(?:([A-Za-z0-9_-]+)\.)?(\d{1,10})\.\d+\.tmp")
    with os.scandir(path.parent) as entries:
        for entry in entries:
            found = unfinished.fullmatch(entry.name)
            if found is None:
                continue
            # Another writer may be faster, or the file not ours to remove.
            with contextlib.suppress(OSError):
                written = entry.stat(follow_symlinks=False).st_mtime
                if _is_left(entry.name, found[1], int(found[2]), written):
                    Path(entry.path).unlink()


def _is_left(name: str, machine: str | None, pid: int, written: float) -> bool:
    if machine != _machine():
        return time.time() - written > _LONGEST_WRITE_S
    if pid == os.getpid():  # in a container that starts anew, numbers come again
        return name not in _under_way
    return not _runs(pid)


def _runs(pid: int) -> bool:
    """Whether there is a process of this number, whoever owns it."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
