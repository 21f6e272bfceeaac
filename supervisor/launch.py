"""Start the supervisor on demand, or find the one that runs.

Blocking and small: no event loop and no aiohttp, so that a caller pays little before its first
paint.
"""

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from veloxquant.supervisor.paths import Paths, UnsafeFolderError, find, prepare

START_SECONDS = 15.0
POLL_SECONDS = 0.02


class SupervisorError(RuntimeError):
    """Raised when there is no supervisor to talk to; the text says why and what to do."""


def is_running(paths: Paths) -> bool:
    """Whether something listens on the control socket."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        probe.connect(os.fspath(paths.socket))
        return True
    return False


def has_left(pid: int, seconds: float) -> bool:
    """Wait until a supervisor that was told to leave has ended; false when it still runs."""
    import psutil

    deadline = time.monotonic() + seconds
    while True:
        try:
            # a zombie has ended; only its parent has not asked yet
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)


def ensure_running(extra: Sequence[str] = (), seconds: float = START_SECONDS) -> Paths:
    """Attach to the running supervisor, or start one and wait until it listens.

    Args:
        extra: further arguments of the supervisor.
        seconds: how long to wait for it.

    Raises:
        SupervisorError: when it cannot be started in time.
    """
    try:
        paths = prepare(find())
    except UnsafeFolderError as error:
        raise SupervisorError(str(error)) from error
    deadline = time.monotonic() + seconds
    while not is_running(paths):
        if time.monotonic() > deadline:
            raise SupervisorError(
                f"the supervisor did not listen within {seconds:g} s; "
                f"see {paths.log / 'supervisor.log'}"
            )
        answer = _start(paths, extra, deadline)
        if answer.startswith("error"):
            raise SupervisorError(f"the supervisor cannot run: {answer.removeprefix('error ')}")
        if not answer.startswith("ok"):
            # Another one holds the lock: it is about to listen, or about to leave.
            time.sleep(POLL_SECONDS)
    return paths


def _start(paths: Paths, extra: Sequence[str], deadline: float) -> str:
    """Start a detached supervisor and return what it tells, empty when it tells nothing."""
    told, tell = os.pipe()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log = os.open(paths.log / "supervisor.log", flags, 0o600)
    try:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "veloxquant.supervisor", "--detach"),
                *("--ready-fd", str(tell), *extra),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=paths.state,
            pass_fds=(tell,),
            start_new_session=True,
        )
    except OSError as error:
        os.close(told)
        raise SupervisorError(f"the supervisor cannot be started: {error}") from error
    finally:
        os.close(tell)
        os.close(log)
    try:
        process.wait()  # it forks at once and leaves, so that it is nobody's zombie
        ready, _, _ = select.select([told], [], [], max(0.0, deadline - time.monotonic()))
        return os.read(told, 1024).decode("utf-8", "replace").strip() if ready else ""
    finally:
        os.close(told)
