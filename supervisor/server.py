"""The control socket: one WebSocket route for panels and command lines of this user.

The folder's mode, the socket's mode and the peer's user id are the authentication. Each viewer
has its own queues and its own sending task; nobody waits for anybody.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Callable

from aiohttp import WSCloseCode, WSMsgType, web

from veloxquant.supervisor.commands import Commands
from veloxquant.supervisor.controller import Controller
from veloxquant.supervisor.hub import kind_of
from veloxquant.supervisor.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Command,
    Done,
    Error,
    Event,
    Hello,
    Kind,
    Message,
    ProtocolError,
    Refuse,
    SubscribeArgs,
    args_of,
    decode,
    encode,
)
from veloxquant.supervisor.paths import secure_folder
from veloxquant.supervisor.viewers import Outbox, TooFarBehindError

log = logging.getLogger(__name__)

ROUTE = "/v1/control"
HELLO_SECONDS = 2.0
SEND_SECONDS = 5.0
BATCH_SECONDS = 0.05
PING_SECONDS = 10.0
MAX_VIEWERS = 64
MAX_COMMANDS = 32


class ControlServer:
    """Serves viewers until `close`."""

    def __init__(self, controller: Controller, leave: Callable[[], None], version: str) -> None:
        self._controller = controller
        self._commands = Commands(controller, leave, self)
        self._version = version
        self._runner: web.AppRunner | None = None
        self._bound = False
        self._sockets: set[web.WebSocketResponse] = set()
        self.last_seen = time.monotonic()

    @property
    def viewers(self) -> int:
        """Number of connected viewers."""
        return len(self._sockets)

    def hello(self) -> Hello:
        """Our side of the hand-shake, with both clocks."""
        return Hello(
            role="supervisor",
            name="veloxquant supervisor",
            pid=os.getpid(),
            epoch=self._controller.hub.epoch,
            wall=time.time(),
            mono=time.monotonic(),
            version=self._version,
        )

    async def open(self) -> None:
        """Bind the socket and serve; a stale socket file is replaced (we hold the lock)."""
        app = web.Application()
        app.router.add_get(ROUTE, self._handle)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        await self.heal()

    async def heal(self) -> None:
        """Bind the socket if its file is not there (cleaners of temporary folders take it)."""
        path = self._controller.paths.socket
        if self._runner is not None and (not self._bound or not path.exists()):
            secure_folder(path.parent)
            await web.SockSite(self._runner, bind_socket(path)).start()
            self._bound = True

    async def close(self) -> None:
        """Say good-bye to every viewer and remove the socket."""
        self._bound = False
        self._controller.paths.socket.unlink(missing_ok=True)
        for ws in list(self._sockets):
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(1.0):
                    await ws.close(code=WSCloseCode.GOING_AWAY, message=b"supervisor leaves")
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        peer = transport.get_extra_info("socket") if transport is not None else None
        if peer is None or peer_uid(peer) != os.geteuid():
            return web.Response(status=403, text="this socket belongs to another user\n")
        if self.viewers >= MAX_VIEWERS:
            return web.Response(status=503, text="too many viewers\n")
        ws = web.WebSocketResponse(
            heartbeat=PING_SECONDS, compress=False, max_msg_size=2 * MAX_MESSAGE_BYTES, timeout=1.0
        )
        await ws.prepare(request)
        self._sockets.add(ws)
        try:
            await ws.send_bytes(encode(self.hello()))
            hello = await self._greet(ws)
            if hello is not None:
                await Viewer(self._controller, self._commands, ws, request, hello).serve()
        except (ConnectionError, asyncio.CancelledError):
            log.debug("viewer left")
        finally:
            self._sockets.discard(ws)
            self.last_seen = time.monotonic()
        return ws

    async def _greet(self, ws: web.WebSocketResponse) -> Hello | None:
        """The viewer's hello, or None after closing on one that is late, foreign or malformed."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                frame = await ws.receive()
            data = frame.data if frame.type in (WSMsgType.TEXT, WSMsgType.BINARY) else b""
            first = decode(data)[0]
        except TimeoutError:
            await ws.close(code=4408, message=b"no hello")
            return None
        except (ProtocolError, IndexError):
            await ws.close(code=4400, message=b"the first message must be hello")
            return None
        if not isinstance(first, Hello) or first.major != PROTOCOL_MAJOR:
            ours = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
            theirs = f"{first.major}.{first.minor}" if isinstance(first, Hello) else "no hello"
            text = f"the supervisor speaks protocol {ours}, this program {theirs}"
            hint = "Restart the supervisor: `vq shutdown`, then start again."
            await ws.send_bytes(encode(Refuse(text, hint)))
            await ws.close(code=4400, message=b"protocol version")
            return None
        return first


class Viewer:
    """One connected client after its hello."""

    def __init__(
        self,
        controller: Controller,
        commands: Commands,
        ws: web.WebSocketResponse,
        request: web.Request,
        hello: Hello,
    ) -> None:
        self._controller = controller
        self._commands = commands
        self._ws = ws
        self._request = request
        self._hello = hello
        self._outbox = Outbox()
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Read commands and send events until either side closes."""
        self._controller.hub.listen(self._outbox.put)
        sender = asyncio.create_task(self._send())
        try:
            await self._receive()
        finally:
            self._controller.hub.unlisten(self._outbox.put)
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _receive(self) -> None:
        async for frame in self._ws:
            if frame.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                continue
            if len(frame.data) > MAX_MESSAGE_BYTES:
                await self._ws.close(code=4413, message=b"message too large")
                return
            try:
                messages = decode(frame.data)
                for message in messages:
                    if not isinstance(message, Command):
                        raise ProtocolError(f"a viewer may not send {type(message).__name__}")
                    self._take(message)
            except ProtocolError as error:
                log.info("viewer %s broke the protocol: %s", self._hello.name, error)
                await self._ws.close(code=4400, message=b"not a message of this protocol")
                return

    def _take(self, command: Command) -> None:
        if command.op == "subscribe":
            self._subscribe(command)
            return
        if len(self._running) >= MAX_COMMANDS:
            text = f"{MAX_COMMANDS} commands of this viewer are under way"
            self._outbox.reply(Error(command.id, "busy", text, "Wait for their answers."))
            return
        task = asyncio.create_task(
            self._commands.answer(command, self._hello, self._outbox.reply), name=command.op
        )
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _subscribe(self, command: Command) -> None:
        """Queue a snapshot or what was missed; from here on live events follow, none twice."""
        try:
            args = args_of(command, SubscribeArgs)
        except ProtocolError as error:
            self._outbox.reply(Error(command.id, "usage", str(error)))
            return
        hub = self._controller.hub
        missed = hub.since(*args.since, args.kinds) if args.since is not None else None
        self._outbox.kinds = frozenset(args.kinds)
        if missed is None:
            self._outbox.reply(hub.snapshot(args.kinds))
        else:
            kinds: list[Kind] = [kind_of(event.body) for event in missed]
            self._outbox.extend(missed, kinds)
        replayed = -1 if missed is None else len(missed)
        self._outbox.reply(Done(command.id, {"replayed": replayed}))

    async def _send(self) -> None:
        """Send batches; a viewer that does not read for a while is cut off."""
        try:
            while True:
                await self._outbox.wait()
                batch = self._outbox.take()
                if not batch:
                    continue
                for data in frames_of(batch):
                    async with asyncio.timeout(SEND_SECONDS):
                        await self._ws.send_bytes(data)
                if self._outbox.is_empty and isinstance(batch[0], Event):
                    await asyncio.sleep(BATCH_SECONDS)
        except TimeoutError:
            # Its pipe is full, so it cannot be told; it may come back and ask for what it missed.
            log.info("viewer %s reads too slowly and is cut off", self._hello.name)
        except TooFarBehindError as behind:
            log.info("viewer %s is too far behind: %d", self._hello.name, behind.code)
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(0.5):
                    await self._ws.close(code=behind.code, message=b"too far behind")
        except ConnectionError:
            log.debug("viewer %s left while being sent to", self._hello.name)
        finally:
            if self._request.transport is not None:
                self._request.transport.abort()


def frames_of(batch: list[Message]) -> list[bytes]:
    """The batch as frames within the limit; a message that alone is over it is left out."""
    data = encode(batch if len(batch) > 1 else batch[0])
    if len(data) <= MAX_MESSAGE_BYTES:
        return [data]
    if len(batch) == 1:
        log.warning("a message of %d bytes is left out", len(data))
        return []
    half = len(batch) // 2
    return frames_of(batch[:half]) + frames_of(batch[half:])


def bind_socket(path: os.PathLike[str]) -> socket.socket:
    """A listening Unix socket that never had a mode wider than 0600.

    Raises:
        OSError: when it cannot be bound.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - the path is any PathLike
    old = os.umask(0o177)
    try:
        sock.bind(os.fspath(path))
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(old)
    sock.setblocking(False)
    return sock


def peer_uid(sock: socket.socket) -> int | None:
    """User id of the other end of a Unix socket, or None when the system does not tell."""
    try:
        if sys.platform == "linux":
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            return struct.unpack("3i", raw)[1]
        raw = sock.getsockopt(0, 1, 76)  # LOCAL_PEERCRED: struct xucred, version then user id
        return struct.unpack_from("=II", raw)[1]
    except (OSError, struct.error):
        return None
