"""Log lines: cutting raw output into lines, the way from threads to the loop, and the files.

Nothing here ever waits for a reader: each queue is bounded, drops its oldest lines when full, and
counts what it dropped. Text that goes into files is made harmless, since a user will `cat` it.
"""

import collections
import contextlib
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from veloxquant.supervisor.messages import MAX_LOG_CHARS, Log

QUEUE_RECORDS = 20_000
QUEUE_CHARS = 8 << 20
FILE_BYTES = 10 << 20
FILE_COUNT = 3
RETRY_SECONDS = 60.0
CUT_MARK = " [cut]"

# C0, DEL, C1, line and paragraph separators, and the controls of writing direction.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code == 9:
        return "    "
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"<{code:04x}>"


def harmless(text: str) -> str:
    """One line of text without anything a terminal would act on; colours are dropped."""
    if not _UNSAFE.search(text):
        return text
    return _UNSAFE.sub(_visible, _ANSI.sub("", text))


def cut(text: str, limit: int = MAX_LOG_CHARS) -> str:
    """Text of at most `limit` characters, with a mark where it was cut."""
    return text if len(text) <= limit else text[: limit - len(CUT_MARK)] + CUT_MARK


class LineSplitter:
    """Cuts bytes into lines of bounded length; holds at most one unfinished line.

    A longer line is cut with a mark and its rest is dropped.
    """

    def __init__(self, limit: int = MAX_LOG_CHARS) -> None:
        self._limit = limit
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> list[str]:
        """Lines that became complete."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines: list[str] = []
        for raw in whole:
            if not self._skipping:
                lines.append(self._text(raw))
            self._skipping = False
        # A line that is too long is told at once; what follows up to its end is dropped.
        if len(rest) > 4 * self._limit or (self._skipping and rest):
            if not self._skipping:
                lines.append(self._text(rest))
            self._skipping, rest = True, b""
        self._rest = rest
        return lines

    def end(self) -> list[str]:
        """The last line, if it had no end of line."""
        rest, self._rest = self._rest, b""
        return [self._text(rest)] if rest and not self._skipping else []

    def _text(self, raw: bytes) -> str:
        text = raw.removesuffix(b"\r").decode("utf-8", "replace")
        return cut(text, self._limit)


class BoundedQueue:
    """Records from any thread to one reader; full means the oldest is dropped and counted."""

    def __init__(self, records: int = QUEUE_RECORDS, chars: int = QUEUE_CHARS) -> None:
        self._items: collections.deque[Log] = collections.deque()
        self._limit, self._chars_limit = records, chars
        self._chars = 0
        self._dropped = 0
        self._lock = threading.Lock()

    def put(self, record: Log) -> bool:
        """Append; true when the queue was empty before, so the reader should be woken."""
        with self._lock:
            was_empty = not self._items
            self._items.append(record)
            self._chars += len(record.text)
            while len(self._items) > self._limit or self._chars > self._chars_limit:
                self._chars -= len(self._items.popleft().text)
                self._dropped += 1
            return was_empty

    def take(self, count: int) -> tuple[int, list[Log]]:
        """How many were dropped before the first, and up to `count` records."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            out = [self._items.popleft() for _ in range(min(count, len(self._items)))]
            self._chars -= sum(len(record.text) for record in out)
            return dropped, out


class FileSink:
    """Rotating log files, written by a thread of their own; a full disk turns them off a while."""

    def __init__(
        self,
        folder: Path,
        on_trouble: Callable[[str], None],
        *,
        file_bytes: int = FILE_BYTES,
        count: int = FILE_COUNT,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.path = folder / "server.log"
        self._on_trouble = on_trouble
        self._file_bytes, self._count, self._retry = file_bytes, count, retry_seconds
        self._queue = BoundedQueue()
        self._wake = threading.Event()
        self._ending = False
        self._fd = -1
        self._off_until = 0.0
        self._thread = threading.Thread(target=self._run, name="log-file", daemon=True)
        self._thread.start()

    def put(self, record: Log) -> None:
        """Queue one record; never waits."""
        if self._queue.put(record):
            self._wake.set()

    def close(self, seconds: float = 2.0) -> None:
        """Write what is queued, then end."""
        self._ending = True
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            ending = self._ending
            while True:
                dropped, records = self._queue.take(500)
                if not dropped and not records:
                    break
                self._write(dropped, records)
            if ending:
                self._close_file()
                return

    def _write(self, dropped: int, records: Iterable[Log]) -> None:
        if time.monotonic() < self._off_until:
            return
        lines = [format_line(record) for record in records]
        if dropped:
            lines.insert(0, f"--- {dropped} lines were dropped here ---\n")
        try:
            self._rotate()
            data = "".join(lines).encode("utf-8", "replace")
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._close_file()
            self._off_until = time.monotonic() + self._retry
            self._on_trouble(f"log files are off for {self._retry:.0f} s: {error.strerror}")

    def _rotate(self) -> None:
        if self._fd >= 0 and os.fstat(self._fd).st_size < self._file_bytes:
            return
        if self._fd >= 0:
            self._close_file()
            for n in range(self._count - 1, 0, -1):
                older = self.path.with_suffix(f".log.{n}")
                newer = self.path.with_suffix(f".log.{n - 1}") if n > 1 else self.path
                with contextlib.suppress(FileNotFoundError):
                    newer.replace(older)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o600)

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@functools.lru_cache(maxsize=4)
def _stamp(second: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))


def format_line(record: Log) -> str:
    """One record as one harmless line of a log file, with local time."""
    second = int(record.wall)
    millis = int((record.wall - second) * 1000)
    request = f" req={record.request}" if record.request else ""
    text = harmless(f"{record.source:<7}{request} {record.text}")
    return f"{_stamp(second)}.{millis:03d} {record.level.upper():<7} {text}\n"
