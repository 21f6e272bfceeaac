"""Everything that becomes a log line, wherever it comes from: the event stream and the files.

Lines come from the worker's link, from ourselves, and from the thread that drains the worker's raw
output; the last through a bounded queue, in portions, so that a flood leaves the loop free.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from veloxquant.supervisor.hub import Hub
from veloxquant.supervisor.logs import BoundedQueue, FileSink, cut
from veloxquant.supervisor.messages import Gap, Log, LogLevel

log = logging.getLogger(__name__)

BATCH = 250
LAST_LINES = 20
LAST_LINE_CHARS = 1_000


class LogBook:
    """Feeds the hub and the log files. Use it on the loop's thread, but for `..._from_thread`."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._raw = BoundedQueue()
        self._files = FileSink(folder, self.trouble_from_thread)

    def add(self, record: Log) -> None:
        """Publish and write one record."""
        record.wall = record.wall or time.time()
        self._hub.publish(record)
        self._files.put(record)

    def say(self, level: LogLevel, text: str) -> None:
        """A line of our own."""
        self.add(Log(level, "supervisor", text))

    def line_from_thread(self, text: str) -> None:
        """A line of the worker's raw output."""
        if self._raw.put(Log("info", "native", text, time.time())):
            self._call(self._flush_on)

    def trouble_from_thread(self, text: str) -> None:
        """Trouble with files, told to viewers but not written to the files."""
        self._call(lambda: self._hub.publish(Log("error", "logs", text, time.time())))

    def flush_all(self) -> None:
        """Take in all raw output that is there."""
        while self._flush():
            pass

    def last_lines(self) -> tuple[str, ...]:
        """The last words of the worker, shortened."""
        lines: list[str] = []
        for event in reversed(self._hub.logs()):
            if isinstance(event.body, Log) and event.body.source != "supervisor":
                lines.append(cut(event.body.text, LAST_LINE_CHARS))
            if len(lines) == LAST_LINES:
                break
        return tuple(lines[::-1])

    async def close(self) -> None:
        """Take in and write what is left."""
        self.flush_all()
        await asyncio.to_thread(self._files.close)

    def _flush(self) -> bool:
        dropped, records = self._raw.take(BATCH)
        if dropped:
            self._hub.publish(Gap("log", dropped))
        for record in records:
            self.add(record)
        return len(records) == BATCH

    def _flush_on(self) -> None:
        if self._flush():
            self._loop.call_soon(self._flush_on)

    def _call(self, what: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            log.debug("the loop is closed already")
