"""The worker's end of the socketpair to its supervisor: never blocks, never grows.

Whoever has something to say appends it and goes on. One thread sends, one listens. When the
supervisor reads too slowly the oldest log lines are dropped first, then gauges; what must arrive
(readiness, failures, answers to commands, states of requests) is never dropped.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from veloxquant.supervisor.framing import pack, recv_frame
from veloxquant.supervisor.messages import (
    MAX_LOG_CHARS,
    Gap,
    Kind,
    Log,
    LogLevel,
    Message,
    Profile,
    ProtocolError,
    Stats,
)

MAX_RECORDS = 4096
MAX_BYTES = 4 << 20
BATCH_RECORDS = 64
BATCH_BYTES = 256 << 10
BATCH_SECONDS = 0.05
_RECORD_BYTES = 400  # what a message without text weighs, roughly

_DROPPABLE: tuple[tuple[type[Message], Kind], ...] = (
    (Log, "log"),
    (Stats, "stats"),
    (Profile, "profile"),
)


def _weight(message: Message) -> int:
    # a character may take six bytes as JSON, but an average is enough for a bound on memory
    return _RECORD_BYTES + (2 * len(message.text) if isinstance(message, Log) else 0)


class Outbox:
    """A bounded queue that forgets log lines before gauges and never anything else."""

    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._items: deque[Message] = deque()
        self._bytes = 0
        self._dropped: dict[Kind, int] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, message: Message) -> None:
        """Append without waiting; makes room by dropping, counted by kind."""
        with self._changed:
            if self._closed:
                return
            self._items.append(message)
            self._bytes += _weight(message)
            while len(self._items) > self._max_records or self._bytes > self._max_bytes:
                if not self._drop_one():
                    break
            self._changed.notify_all()

    def _drop_one(self) -> bool:
        for cls, kind in _DROPPABLE:
            for at, item in enumerate(self._items):
                if isinstance(item, cls):
                    del self._items[at]
                    self._bytes -= _weight(item)
                    self._dropped[kind] = self._dropped.get(kind, 0) + 1
                    return True
        return False

    def take(self, timeout: float | None = None) -> list[Message]:
        """The next batch, oldest first, with notes of what was dropped; empty on time-out."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed, timeout)
            batch: list[Message] = [Gap(kind, count) for kind, count in self._dropped.items()]
            self._dropped.clear()
            size = 0
            while self._items and len(batch) < BATCH_RECORDS and size < BATCH_BYTES:
                item = self._items.popleft()
                self._bytes -= _weight(item)
                size += _weight(item)
                batch.append(item)
            if not self._items:
                self._changed.notify_all()
            return batch

    def close(self) -> None:
        """Accept nothing more; what is queued can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def is_done(self) -> bool:
        """Whether it is closed and empty."""
        with self._changed:
            return self._closed and not self._items


class Link:
    """Both directions of the socketpair, on two daemon threads.

    `on_message` and `on_end` run on the listening thread; `on_end` when the supervisor is gone.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._outbox = Outbox()
        self._sender = threading.Thread(target=self._send_all, name="link-send", daemon=True)
        self._reader = threading.Thread(target=self._read_all, name="link-read", daemon=True)

    def start(self) -> None:
        """Start sending and listening."""
        self._sender.start()
        self._reader.start()

    def send(self, message: Message) -> None:
        """Queue a message; never waits."""
        self._outbox.put(message)

    def finish(self, timeout: float = 2.0) -> None:
        """Send what is queued, then stop sending; waits at most `timeout` seconds."""
        self._outbox.close()
        self._sender.join(timeout)

    def _send_all(self) -> None:
        while not self._outbox.is_done:
            batch = self._outbox.take()
            if not batch:
                continue
            try:
                self._sock.sendall(pack(batch))
            except ProtocolError:
                for message in batch:  # too large together: one by one, without the culprit
                    self._send_alone(message)
            except OSError:
                self._on_end()
                return
            if len(batch) < BATCH_RECORDS and not self._outbox.is_done:
                time.sleep(BATCH_SECONDS)

    def _send_alone(self, message: Message) -> None:
        try:
            self._sock.sendall(pack(message))
        except (ProtocolError, OSError):
            self._outbox.put(Gap("log", 1))

    def _read_all(self) -> None:
        try:
            while messages := recv_frame(self._sock):
                for message in messages:
                    self._on_message(message)
        except (OSError, ProtocolError) as error:
            logging.getLogger(__name__).error("The supervisor's link broke: %s", error)
        self._on_end()


_LEVELS: tuple[tuple[int, LogLevel], ...] = (
    (logging.ERROR, "error"),
    (logging.WARNING, "warning"),
    (logging.INFO, "info"),
)


class LinkHandler(logging.Handler):
    """Sends log records up the link; a record may carry a request id as `extra={"request": id}`."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record; a record that cannot be formatted is reported, not raised."""
        try:
            text = self.format(record)
        except (TypeError, ValueError):
            self.handleError(record)
            return
        level: LogLevel = "debug"
        for at, name in reversed(_LEVELS):
            level = name if record.levelno >= at else level
        if len(text) > MAX_LOG_CHARS:
            text = text[: MAX_LOG_CHARS - 4] + " ..."
        source = record.name.rpartition(".")[2]
        request = getattr(record, "request", "")
        self._send(Log(level, source, text, wall=record.created, request=request))
