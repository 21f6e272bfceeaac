"""The life of a worker: launch, load, serve, drain, leave with the right exit code."""

import asyncio
import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import time
from typing import Any

import psutil

import veloxquant
from veloxquant.supervisor.messages import (
    PROTOCOL_MAJOR,
    Accepted,
    Beat,
    Command,
    Done,
    Error,
    Fatal,
    Hello,
    Launch,
    LaunchSpec,
    ProtocolError,
    Refuse,
    StopArgs,
    args_of,
)
from veloxquant.worker.deadman import EXIT_ORPHANED, SERVING_SECONDS, DeadMan
from veloxquant.worker.faults import WorkerFault
from veloxquant.worker.link import Link, LinkHandler

logger = logging.getLogger(__name__)

LAUNCH_SECONDS = 30.0
GRACE_SECONDS = 10.0


class Worker:
    """One serving process at the end of a link."""

    def __init__(self, sock: socket.socket, deadman: DeadMan) -> None:
        sock.set_inheritable(False)
        self._deadman = deadman
        self._link = Link(sock, self._on_message, self._on_end)
        self._launches: queue.Queue[Launch] = queue.Queue(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commands: asyncio.Queue[Command] | None = None
        self._grace = GRACE_SECONDS

    def run(self) -> int:
        """Serve until stopped; returns the exit code. Every fault is told before leaving."""
        self._start_logging()
        self._link.start()
        self._link.send(_hello())
        try:
            self._serve(self._wait_for_launch())
            code = 0
        except WorkerFault as fault:
            logger.error("%s", fault)
            self._link.send(Fatal(fault.fault))
            code = fault.exit_code
        except Exception as error:  # the process's boundary
            logger.exception("The worker failed")
            fault = WorkerFault("internal", f"{type(error).__name__}: {error}"[:500])
            self._link.send(Fatal(fault.fault))
            code = fault.exit_code
        self._link.finish()
        return code

    def _start_logging(self) -> None:
        root = logging.getLogger()
        root.setLevel(logging.WARNING)
        logging.getLogger("veloxquant").setLevel(logging.INFO)
        root.addHandler(LinkHandler(self._link.send))
        logging.captureWarnings(True)

    def _wait_for_launch(self) -> Launch:
        try:
            return self._launches.get(timeout=LAUNCH_SECONDS)
        except queue.Empty as error:
            raise WorkerFault("usage", "No launch message came over the link.") from error

    # ---- the listening thread ---------------------------------------------------------------

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Beat):
            self._deadman.feed()
        elif isinstance(message, Hello) and message.major != PROTOCOL_MAJOR:
            self._link.send(Refuse(f"protocol {message.major} is not {PROTOCOL_MAJOR}"))
        elif isinstance(message, Launch):
            if not self._launches.full():
                self._launches.put_nowait(message)
        elif isinstance(message, Command):
            self._on_command(message)

    def _on_command(self, command: Command) -> None:
        loop, commands = self._loop, self._commands
        if loop is None or commands is None:
            self._link.send(Error(command.id, "not_ready", "The worker is still starting."))
            return
        self._link.send(Accepted(command.id))
        loop.call_soon_threadsafe(commands.put_nowait, command)

    def _on_end(self) -> None:
        os._exit(EXIT_ORPHANED)

    # ---- serving ----------------------------------------------------------------------------

    def _serve(self, launch: Launch) -> None:
        from veloxquant.worker.backend import preload_openblas
        from veloxquant.worker.caches import config_of
        from veloxquant.worker.gate import open_gate
        from veloxquant.worker.startup import Stages

        spec = launch.spec
        stages = Stages(self._link.send)
        with stages.stage("process", f"pid {os.getpid()}"):
            _check(spec, launch.token)
            config = config_of(spec)
            gated = open_gate(spec.model, spec.name)
            listener = _listener(launch)
        with stages.stage("imports"):
            if spec.openblas:
                preload_openblas()
            from veloxquant.worker.serving import Service
        service = Service(launch, gated, config, listener, stages, self._link.send)
        asyncio.run(self._until_stopped(service))

    async def _until_stopped(self, service: Any) -> None:
        loop = asyncio.get_running_loop()
        self._commands = asyncio.Queue()
        self._loop = loop
        stop = asyncio.Event()
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(name, stop.set)
        answering = asyncio.create_task(self._answer_commands(service, stop))
        try:
            ready = await service.start(stop)
            if ready is not None:
                self._deadman.allow(SERVING_SECONDS)
                self._link.send(ready)
                await service.wait(stop)
            await service.finish(self._grace)
        finally:
            answering.cancel()

    async def _answer_commands(self, service: Any, stop: asyncio.Event) -> None:
        assert self._commands is not None
        while True:
            command = await self._commands.get()
            try:
                if command.op == "drain":
                    self._grace = args_of(command, StopArgs).grace
                    stop.set()
                    self._link.send(Done(command.id))
                else:
                    self._link.send(Done(command.id, await service.command(command)))
            except ProtocolError as error:
                self._link.send(Error(command.id, "bad_arguments", str(error)))
            except Exception as error:  # a command's boundary: it is answered, not fatal
                logger.exception("Command %s failed", command.op)
                self._link.send(Error(command.id, "failed", f"{type(error).__name__}: {error}"))


def _hello() -> Hello:
    return Hello(
        role="worker",
        name=f"worker-{os.getpid()}",
        pid=os.getpid(),
        start_time=psutil.Process().create_time(),
        wall=time.time(),
        mono=time.monotonic(),
        version=veloxquant.__version__,
        capabilities=["audit", "drain", "cancel"],
    )


def _check(spec: LaunchSpec, token: str) -> None:
    from veloxquant.worker.guard import is_loopback

    for name, value, low in (
        ("context", spec.context, 16),
        ("batch", spec.batch, 1),
        ("max_tokens", spec.max_tokens, 1),
        ("block_size", spec.block_size, 1),
        ("prefill_step", spec.prefill_step or 1, 1),
    ):
        if value < low:
            raise WorkerFault("usage", f"{name}={value}: use {low} or more.")
    if spec.api_key and not token:
        raise WorkerFault("usage", "An API key is required but none was handed over.")
    if not spec.api_key and not is_loopback(spec.host):
        raise WorkerFault(
            "usage", f"{spec.host} is reachable from other machines; turn the API key on first."
        )


def _listener(launch: Launch) -> socket.socket:
    """The socket the supervisor bound, or one of our own."""
    if launch.listen_fd >= 0:
        try:
            sock = socket.socket(fileno=launch.listen_fd)
        except OSError as error:
            raise WorkerFault("usage", f"Descriptor {launch.listen_fd} is no socket.") from error
    else:
        family = socket.AF_INET6 if ":" in launch.spec.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((launch.spec.host, launch.spec.port))
        except OSError as error:
            sock.close()
            raise WorkerFault(
                "port_taken", f"{launch.spec.host}:{launch.spec.port}: {error.strerror}"
            ) from error
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


def leave(code: int) -> None:
    """End the process now: a thread inside MLX cannot be joined, and must not hold us up."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
