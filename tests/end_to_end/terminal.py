"""A pty with a terminal in it: the panel as users see it."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

import pyte

# a machine that runs other things as well takes long for everything
PATIENCE_S = 150.0
# private questions and settings that pyte would print
_UNKNOWN = re.compile(r"\x1b\[[<>=?][\d;]*[^\d;hl]|\x1b\[[\d;]*\$[a-z]|\x1b_[^\x1b]*\x1b\\\\")


class Terminal:
    """A program in a pty, and the screen it draws."""

    def __init__(self, *command: str, size: tuple[int, int] = (100, 30), **env: str) -> None:
        self.screen = pyte.Screen(*size)
        self._stream = pyte.Stream(self.screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._fd, inner = pty.openpty()
        wide, high = size
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", high, wide, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color", "TEXTUAL_ANIMATIONS": "none"} | env,
        )  # fmt: skip
        os.close(inner)

    @classmethod
    def panel(cls, **env: str) -> "Terminal":
        """The panel as `vq panel` starts it; greedy answers."""
        command = (sys.executable, "-P", "-m", "veloxquant", "panel")
        return cls(*command, VELOXQUANT_CHAT_TEMPERATURE="0", **env)

    def pump(self, seconds: float = 0.05) -> None:
        """Take in what was written within `seconds`."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self._fd], [], [], left)
            if not ready:
                return
            try:
                data = os.read(self._fd, 65_536)
            except OSError:  # the other side is closed
                time.sleep(min(left, 0.01))
                return
            self._stream.feed(_UNKNOWN.sub("", self._decoder.decode(data)))

    @property
    def text(self) -> str:
        """The screen, line by line."""
        return "\n".join(self.screen.display)

    def until(self, *words: str, seconds: float = PATIENCE_S) -> str:
        """Wait until all words are on the screen."""
        return self.when(lambda: all(word in self.text for word in words), str(words), seconds)

    def when(self, is_so: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> str:
        """Wait until something is so, while the program goes on drawing."""
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}:\n{self.text}"
            assert self.process.poll() is None, f"the program ended:\n{self.text}"
            self.pump()
        return self.text

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._fd, keys.encode())

    def wait(self, seconds: float = 30.0) -> int:
        """Wait for its end; what it draws until then is taken in."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < end, f"still there after {seconds:.0f} s:\n{self.text}"
            self.pump()
        return self.process.wait()

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
