"""Never outlive the supervisor: parent watch, end of the link, and a timer in C.

Three nets, since each has a hole. The death signal of Linux fires at once but exists only there.
The end of the link is seen by a Python thread, which waits while C code holds the interpreter.
The timer of `faulthandler` runs without the interpreter, but only after its time is up.
"""

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading

EXIT_ORPHANED = 75
SERVING_SECONDS = 30.0
LOADING_SECONDS = 300.0

_PR_SET_PDEATHSIG = 1


def watch_parent(parent: int) -> None:
    """Die with the parent; leave at once if it is gone already.

    The comparison comes after arming, so a parent that died in between is noticed too.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    elif hasattr(select, "kqueue"):
        threading.Thread(
            target=_wait_for_exit, args=(parent,), name="parent-watch", daemon=True
        ).start()
    if os.getppid() != parent:
        os._exit(EXIT_ORPHANED)


def _wait_for_exit(parent: int) -> None:
    queue = select.kqueue()  # type: ignore[attr-defined]
    event = select.kevent(  # type: ignore[attr-defined]
        parent,
        filter=select.KQ_FILTER_PROC,  # type: ignore[attr-defined]
        flags=select.KQ_EV_ADD,  # type: ignore[attr-defined]
        fflags=select.KQ_NOTE_EXIT,  # type: ignore[attr-defined]
    )
    with contextlib.suppress(ProcessLookupError):  # it ended before we could watch it
        queue.control([event], 1, None)
    os._exit(EXIT_ORPHANED)


def show_stacks_on_request() -> None:
    """Write the stack of every thread to standard error when SIGUSR1 arrives."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


class DeadMan:
    """A timer in C that ends this process unless it is fed.

    Each sign of life from the supervisor feeds it. While the model loads, the time is that of the
    start budget, since one long call may hold the interpreter.
    """

    def __init__(self, seconds: float = LOADING_SECONDS) -> None:
        self.seconds = seconds
        self.feed()

    def feed(self) -> None:
        """Start the time anew."""
        faulthandler.dump_traceback_later(self.seconds, exit=True)

    def allow(self, seconds: float) -> None:
        """Change the time that may pass between two signs of life."""
        self.seconds = seconds
        self.feed()

    def disarm(self) -> None:
        """Stop the timer; only for a process that is leaving anyway."""
        faulthandler.cancel_dump_traceback_later()
