"""The client of the control socket, used by panel and command line; no textual in here.

Use it so::

    async with ControlClient(role="panel", name="vq panel") as client:   # starts the supervisor
        state = await client.command("status")
        await client.command("start", {"spec": {"model": "/models/Qwen3-0.6B", "method": "kivi"}})
        async for item in client.events():        # never ends by itself; survives reconnects
            match item:
                case LinkChange(up=False): ...    # grey out, show item.reason
                case LinkChange(up=True): ...
                case Snapshot(): ...              # replaces everything that was known
                case Event(body=State()): ...     # `body` is State, Stats, Log, Progress, Request,
                                                  # Profile or Gap of `messages.py`

    run_command("stop", {"grace": 10.0})          # without an event loop, for the command line

Commands and what they answer (`dict`); every refusal raises `CommandError(code, message, hint)`:

    start {"spec": {fields of LaunchSpec}}
        {"state": State} once the process runs, or already runs with the same spec; follow the
        `State` events to `ready`. Refused with `usage`, `model_missing`, `port_taken`,
        `already_running`.
    stop {"grace": 10.0}
        {"state": State} when no process is left.
    restart {}
        {"state": State} once the new process runs; the specification is the same.
    status {}
        {"state": State, "stats": Stats | None, "summary": {...}, "base_url": str | None,
        "token_file": str | None, "history": [past launches], "barred": bool,
        "supervisor": {"pid", "version", "epoch", "uptime", "viewers"}}
    logs {"last": 200, "level": "debug", "grep": ""}
        {"lines": [{"seq", "t", "wall", "level", "source", "request", "text"}], "dropped": int}
    audit {}
        What the worker counts when it walks its objects.
    drain {"grace": 10.0}
        {} when running answers are done; nothing new is admitted.
    cancel {"request": id}
        {} when the request is cut.
    shutdown {}
        {"pid": the supervisor's} when the server is stopped; then the supervisor leaves.

`State` and `Stats` in results are plain dicts with every field, defaults included.
`events()` yields `LinkChange`, `Snapshot` and `Event`: after (re)connecting either a `Snapshot`
(first time, or when too much was missed) or just the events that were missed; nothing is doubled.
"""

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.supervisor.launch import SupervisorError, ensure_running, is_running
from veloxquant.supervisor.messages import (
    CLOSE_CODES,
    MAX_MESSAGE_BYTES,
    PROTOCOL_MAJOR,
    Accepted,
    Command,
    Done,
    Error,
    Event,
    Hello,
    Kind,
    Op,
    ProtocolError,
    Refuse,
    Role,
    Snapshot,
    SubscribeArgs,
    decode,
    encode,
    plain,
)
from veloxquant.supervisor.paths import find

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientWebSocketResponse

HELLO_SECONDS = 5.0
COMMAND_SECONDS = 120.0
RETRY_FIRST_SECONDS = 0.1
RETRY_MOST_SECONDS = 2.0
MAX_UNREAD = 20_000


class CommandError(RuntimeError):
    """Raised when a command is refused or fails; `hint` says what to do."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


class NotConnectedError(ConnectionError):
    """Raised when there is no supervisor, or the link to it is down; the text says why."""


class LinkChange(NamedTuple):
    """The link to the supervisor came up or went down; `attempt` counts tries to come back."""

    up: bool
    reason: str = ""
    code: int = 0
    attempt: int = 0


Item = Event | Snapshot | LinkChange


class ControlClient:
    """One connection to the supervisor. Use it within one event loop; close it, or `async with`.

    Args:
        name: shown to others as who asked for something.
        role: `panel` or `cli`.
        read_only: only watch; the supervisor enforces it.
        kinds: streams to receive, all by default.
        extra: further arguments when the supervisor has to be started.
    """

    def __init__(
        self,
        *,
        name: str = "client",
        role: Role = "cli",
        read_only: bool = False,
        kinds: Sequence[Kind] | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        self._name, self._read_only = name, read_only
        self._role: Role = role
        self._subscription = SubscribeArgs() if kinds is None else SubscribeArgs(list(kinds))
        self._extra = tuple(extra)
        self._session: ClientSession | None = None
        self._ws: ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._wants_events = False
        self._last: tuple[str, int] | None = None
        self._closing = False
        self._connecting = asyncio.Lock()
        self.hello: Hello | None = None

    async def __aenter__(self) -> "ControlClient":
        await self.connect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def is_connected(self) -> bool:
        """Whether the link is up."""
        return self._ws is not None and not self._ws.closed

    async def connect(self, start: bool = True) -> Hello:
        """Connect; starts the supervisor when none runs and `start` is true.

        Raises:
            NotConnectedError: when none runs or it cannot be started.
            CommandError: with code `protocol` when it speaks another version.
        """
        async with self._connecting:
            if self.is_connected and self.hello is not None:
                return self.hello
            self._closing = False
            try:
                if start:
                    await asyncio.to_thread(ensure_running, self._extra)
                return await self._open()
            except SupervisorError as error:
                raise NotConnectedError(str(error)) from error

    async def command(
        self, op: Op, args: dict[str, Any] | None = None, seconds: float = COMMAND_SECONDS
    ) -> dict[str, Any]:
        """Send a command and return its result; see the table at the top of this module.

        Raises:
            CommandError: when it is refused, fails, or is not answered within `seconds`.
            NotConnectedError: when the link is down.
        """
        if self._ws is None or self._ws.closed:
            raise NotConnectedError("not connected to the supervisor")
        name = uuid.uuid4().hex
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[name] = answer
        try:
            await self._ws.send_bytes(encode(Command(name, op, args or {})))
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            text = f"the supervisor did not answer `{op}` within {seconds:g} s"
            raise CommandError("timeout", text, "Look at `vq status`.") from None
        except ConnectionError as error:
            raise NotConnectedError(str(error)) from error
        finally:
            self._waiting.pop(name, None)

    async def events(self) -> AsyncIterator[Item]:
        """Everything that happens, from now on, over reconnects, until `close`.

        Yields `LinkChange(up=False)` when the link is lost and `LinkChange(up=True)` when it is
        back. A supervisor that has gone is not started again by this; `connect` does that.
        """
        self._wants_events = True
        if self.is_connected:
            await self._subscribe()
        attempt = 0
        while not self._closing:
            if not self.is_connected and self._items.empty():
                attempt += 1
                delay = min(RETRY_MOST_SECONDS, RETRY_FIRST_SECONDS * 2.0 ** (attempt - 1))
                await asyncio.sleep(delay)
                try:
                    await self.connect(start=False)
                except (NotConnectedError, CommandError) as error:
                    yield LinkChange(False, str(error), attempt=attempt)
                continue
            item = await self._items.get()
            if isinstance(item, LinkChange):
                if self._closing:
                    return
                attempt = 0 if item.up else attempt
                yield item
            elif self._is_new(item):
                yield item

    async def close(self) -> None:
        """Close the link; `events` ends."""
        self._closing = True
        self._items.put_nowait(LinkChange(False, "closed"))
        if self._ws is not None:
            await self._ws.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _open(self) -> Hello:
        # Imported here: it takes as long as everything else before a panel's first paint.
        import aiohttp

        if self._session is not None:
            await self._session.close()
        path = os.fspath(find().socket)
        self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(path))
        try:
            self._ws = await self._session.ws_connect(
                "http://supervisor/v1/control", max_msg_size=MAX_MESSAGE_BYTES, compress=0
            )
            await self._ws.send_bytes(
                encode(
                    Hello(
                        self._role,
                        self._name,
                        os.getpid(),
                        read_only=self._read_only,
                        wall=time.time(),
                        mono=time.monotonic(),
                    )
                )
            )
            async with asyncio.timeout(HELLO_SECONDS):
                frame = await self._ws.receive()
            first = decode(frame.data)[0] if isinstance(frame.data, bytes | str) else None
        except (aiohttp.ClientError, OSError, TimeoutError, ProtocolError) as error:
            await self._session.close()
            self._session = self._ws = None
            text = "no supervisor runs" if not is_running(find()) else f"no answer: {error!r}"
            raise NotConnectedError(text) from error
        if isinstance(first, Refuse):
            raise CommandError("protocol", first.reason, first.hint)
        if not isinstance(first, Hello) or first.major != PROTOCOL_MAJOR:
            await self._ws.close()
            raise CommandError("protocol", CLOSE_CODES[4400], "Run `vq shutdown`, then try again.")
        self.hello = first
        self._reader = asyncio.create_task(self._read(self._ws))
        if self._wants_events:
            await self._subscribe()
            self._items.put_nowait(LinkChange(True))
        return first

    async def _subscribe(self) -> None:
        self._subscription.since = self._last
        await self.command("subscribe", plain(self._subscription))

    async def _read(self, ws: "ClientWebSocketResponse") -> None:
        """Deal out what comes in, until the link ends."""
        reason = ""
        try:
            async for frame in ws:
                if not isinstance(frame.data, bytes | str):
                    continue
                for message in decode(frame.data):
                    self._take(message)
                if self._items.qsize() > MAX_UNREAD:
                    reason = "too much unread; coming back with a snapshot"
                    await ws.close()
        except (ProtocolError, ConnectionError) as error:
            reason = str(error)
        finally:
            code = ws.close_code or 0
            reason = reason or CLOSE_CODES.get(code, "the supervisor went away")
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(NotConnectedError(reason))
            if self._wants_events and not self._closing:
                self._items.put_nowait(LinkChange(False, reason, code))

    def _take(self, message: object) -> None:
        if isinstance(message, Event | Snapshot):
            self._items.put_nowait(message)
        elif isinstance(message, Done | Error):
            answer = self._waiting.get(message.id)
            if answer is None or answer.done():
                return
            if isinstance(message, Done):
                answer.set_result(message.result)
            else:
                answer.set_exception(CommandError(message.code, message.message, message.hint))
        elif not isinstance(message, Accepted | Hello):
            raise ProtocolError(f"the supervisor may not send {type(message).__name__}")

    def _is_new(self, item: Event | Snapshot) -> bool:
        """Whether the item goes beyond what was yielded; remembers how far we are."""
        seen = self._last
        is_event = isinstance(item, Event)
        if is_event and seen is not None and seen[0] == item.epoch and item.seq <= seen[1]:
            return False
        self._last = (item.epoch, item.seq)
        return True


async def _with_client(
    work: Callable[[ControlClient], Awaitable[dict[str, Any]]], start: bool, name: str
) -> dict[str, Any]:
    client = ControlClient(name=name)
    try:
        await client.connect(start)
        return await work(client)
    finally:
        with contextlib.suppress(ConnectionError):
            await client.close()


def run_command(
    op: Op,
    args: dict[str, Any] | None = None,
    *,
    start: bool = True,
    seconds: float = COMMAND_SECONDS,
    name: str = "vq",
) -> dict[str, Any]:
    """Connect, send one command, and return its result; for callers without an event loop.

    Raises:
        NotConnectedError: when no supervisor runs and `start` is false, or it cannot be started.
        CommandError: when the command is refused or fails.
    """
    return asyncio.run(_with_client(lambda c: c.command(op, args, seconds), start, name))
