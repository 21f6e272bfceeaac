"""Our end of the link to the worker: length-prefixed messages over an inherited socketpair.

The end of the stream is the end of the worker. Heartbeats go down once a second; a worker that
does not read gets none, and its own dead-man ends it.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from veloxquant.supervisor.failures import fault
from veloxquant.supervisor.framing import TruncatedError, pack, read_frame
from veloxquant.supervisor.messages import (
    MAX_LIST,
    PROTOCOL_MAJOR,
    Accepted,
    Beat,
    Command,
    Done,
    Error,
    Fatal,
    Fault,
    Gap,
    Hello,
    Launch,
    Log,
    Message,
    Op,
    Profile,
    Progress,
    ProtocolError,
    Ready,
    Request,
    Stats,
)

BEAT_SECONDS = 1.0
MAX_UNREAD_BYTES = 1 << 18
FROM_WORKER = (
    Hello, Beat, Ready, Fatal, Progress, Stats, Log, Request, Profile, Gap, Accepted, Done, Error,
)  # fmt: skip


class WorkerGoneError(RuntimeError):
    """Raised when a command cannot be answered since the worker is gone or silent."""


class WorkerRefusedError(RuntimeError):
    """Raised when the worker answers a command with an error."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        self.error = error


class WorkerLink:
    """Talks to one worker from `run` to the end of its stream."""

    def __init__(
        self,
        sock: socket.socket,
        launch: Launch,
        on_message: Callable[[Message], None],
        on_end: Callable[[Fault | None], None],
    ) -> None:
        self._sock = sock
        self._launch = launch
        self._on_message = on_message
        self._on_end = on_end
        self._ids = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        # Kept for as long as the link lives: a collected writer would close the socket.
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Greet, launch, then read until the end; calls `on_end` with a fault if one broke it."""
        problem: Fault | None = None
        beats: asyncio.Task[None] | None = None
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._sock)
            hello = Hello("supervisor", "supervisor", os.getpid(), wall=time.time())
            hello.mono = time.monotonic()
            self._send(hello)
            self._send(self._launch)
            beats = asyncio.create_task(self._beat())
            await self._read(reader)
        except TruncatedError:
            problem = None  # killed while it wrote; its exit status says more
        except ProtocolError as error:
            problem = fault("internal", f"the worker broke the protocol: {error}")
        except OSError as error:
            problem = None if isinstance(error, ConnectionError) else fault("internal", str(error))
        finally:
            if beats is not None:
                beats.cancel()
            self._fail_waiting()
        self._on_end(problem)

    async def command(self, op: Op, args: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The worker's answer to a command.

        Raises:
            WorkerRefusedError: when it answers with an error.
            WorkerGoneError: when it is gone, or does not answer within `seconds`.
        """
        name = f"s{next(self._ids)}"
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[name] = answer
        try:
            self._send(Command(name, op, args))
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise WorkerGoneError(f"the worker did not answer `{op}` in {seconds:g} s") from None
        finally:
            self._waiting.pop(name, None)

    def close(self) -> None:
        """Close our end; the worker leaves when it sees that."""
        if self._writer is None:
            self._sock.close()
        else:
            self._writer.close()
        self._fail_waiting()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        greeted = False
        while messages := await read_frame(reader):
            for message in messages:
                if not isinstance(message, FROM_WORKER):
                    raise ProtocolError(f"a worker may not send {type(message).__name__}")
                if not greeted:
                    check_hello(message)
                greeted = True
                check_lists(message)
                self._take(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, Done | Error):
            answer = self._waiting.get(message.id)
            if answer is None or answer.done():
                return
            if isinstance(message, Done):
                answer.set_result(message.result)
            else:
                answer.set_exception(WorkerRefusedError(message))
        elif not isinstance(message, Accepted):
            self._on_message(message)

    async def _beat(self) -> None:
        with contextlib.suppress(WorkerGoneError):
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                self._send(Beat(time.monotonic()))

    def _send(self, message: Message) -> None:
        writer = self._writer
        if writer is None or writer.is_closing():
            raise WorkerGoneError("the link to the worker is closed")
        if isinstance(message, Beat) and (
            writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES
        ):
            return
        with contextlib.suppress(ConnectionError):
            writer.write(pack(message))

    def _fail_waiting(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(WorkerGoneError("the worker is gone"))


def check_hello(message: Message) -> None:
    """Refuse a worker that does not begin with a hello of our protocol.

    Raises:
        ProtocolError: saying what it did instead.
    """
    if not isinstance(message, Hello):
        raise ProtocolError("the first message must be hello")
    if message.major != PROTOCOL_MAJOR:
        raise ProtocolError(
            f"the worker speaks protocol {message.major}, the supervisor {PROTOCOL_MAJOR}; "
            f"restart the supervisor with `vq shutdown`"
        )


def check_lists(message: Message) -> None:
    """Refuse lists longer than the protocol allows.

    Raises:
        ProtocolError: for such a message.
    """
    size = 0
    if isinstance(message, Stats) and message.pool is not None:
        size = len(message.pool.cells)
    elif isinstance(message, Profile):
        size = len(message.layers)
    elif isinstance(message, Ready):
        size = len(message.warnings)
    if size > MAX_LIST:
        raise ProtocolError(f"{type(message).__name__} with {size} items, limit {MAX_LIST}")
