"""Leaving on SIGTERM and SIGHUP, also when the terminal has stopped taking output.

A terminal that is gone while output waits leaves Textual's writer blocked and its reader spinning;
so the orderly end gets a few seconds and then the process ends all the same.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

PATIENCE_S = 3.0


def heed(leave: Callable[[], None]) -> None:
    """Call `leave` when asked to end; it must only schedule the end, since it runs in between.

    Does nothing outside the main thread, where Python allows no handlers.
    """

    def handler(_number: int, _frame: FrameType | None) -> None:
        # A Python-level handler also runs while the main thread waits for the writer.
        watchdog = threading.Timer(PATIENCE_S, os._exit, (0,))
        watchdog.daemon = True
        watchdog.start()
        leave()

    with contextlib.suppress(ValueError):
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, handler)
