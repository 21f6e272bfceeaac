"""The shell around the state machine: carries out its effects on real processes and sockets.

Everything here runs on the event loop's thread, the main one. The worker's raw output comes
from a thread through a bounded queue.
"""

import asyncio
import contextlib
import logging
import random
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from veloxquant.supervisor import ports
from veloxquant.supervisor.effects import (
    Drain,
    Effect,
    Limits,
    Publish,
    RefusedError,
    Release,
    Signal,
    Spawn,
)
from veloxquant.supervisor.failures import fault
from veloxquant.supervisor.hub import Hub
from veloxquant.supervisor.journal import Journal, Record, write_atomic
from veloxquant.supervisor.lifecycle import ALIVE, Machine
from veloxquant.supervisor.links import WorkerGoneError, WorkerLink, WorkerRefusedError
from veloxquant.supervisor.logbook import LogBook
from veloxquant.supervisor.messages import (
    Beat,
    Body,
    Fatal,
    Fault,
    Hello,
    Launch,
    LaunchSpec,
    Log,
    Message,
    Op,
    Progress,
    Ready,
    State,
    Stats,
)
from veloxquant.supervisor.paths import Paths
from veloxquant.supervisor.policy import Policy
from veloxquant.supervisor.preflight import check_spec, find_model
from veloxquant.supervisor.process import WORKER_MODULE, WorkerProcess

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
URGENT_SECONDS = 0.05
LAST_WORDS_SECONDS = 1.0


class Controller:
    """Owns the worker process, the machine, the journal and the event stream."""

    def __init__(
        self,
        paths: Paths,
        *,
        module: str = WORKER_MODULE,
        policy: Policy | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.paths = paths
        self.hub = Hub()
        self.journal = Journal(paths.journal)
        self.machine = Machine(policy or Policy(), limits or Limits())
        self._module = module
        self._loop = asyncio.get_running_loop()
        self.logs = LogBook(self.hub, paths.log)
        self._disk = ThreadPoolExecutor(1, "journal")
        self._listen: socket.socket | None = None
        self._bound = ("", 0)
        self._worker: WorkerProcess | None = None
        self._link: WorkerLink | None = None
        self._record: Record | None = None
        self._token = ""
        self._disk_failed = False
        self._saved: Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._starting = asyncio.Lock()
        self._stops = 0

    # ---- life of the supervisor -------------------------------------------------------------

    def open(self) -> None:
        """Heal what an earlier supervisor left, then start the clock."""
        why, found = self.journal.adopt()
        for sentence in [*self.journal.notices, *found]:
            self.logs.say("warning", sentence)
        if self.journal.records:
            self.machine.spec = self.journal.records[-1].spec
        if why is not None:
            self.machine.last_lines = self.journal.records[-1].last_lines
            self.machine.phase, self.machine.reason = "failed", why
        self.machine.warnings = found
        self.machine.since = time.monotonic()
        self.hub.publish(self.machine.state(time.monotonic()))
        self._save()
        self._spawn_task(self._tick())

    async def close(self, grace: float) -> None:
        """Stop the worker, write everything, end all tasks."""
        await self.stop(grace, "supervisor")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.logs.close()
        await asyncio.to_thread(self._disk.shutdown)

    @property
    def is_idle(self) -> bool:
        """Whether no process runs or is about to."""
        return self.machine.phase in ("stopped", "failed")

    @property
    def base_url(self) -> str | None:
        """Where the API is, while a server exists."""
        spec, port = self.machine.spec, self.machine.port
        if spec is None or port is None:
            return None
        host = f"[{spec.host}]" if ":" in spec.host else spec.host
        return f"http://{host}:{port}/v1"

    # ---- commands ---------------------------------------------------------------------------

    async def start(self, spec: LaunchSpec, by: str) -> State:
        """Check, start, and return once the process runs.

        Raises:
            RefusedError: with the reason; for what a user must see later too, the state is
                `failed` with the same reason.
        """
        check_spec(spec)
        async with self._starting:
            if not self._runs(spec):
                self.machine.check_startable(spec)
                stops = self._stops
                found = await asyncio.to_thread(find_model, spec.model)
                if stops != self._stops:
                    raise RefusedError("stopped", "the start was stopped by another command")
                if isinstance(found, Fault):
                    self._apply(self.machine.refuse(time.monotonic(), spec, found, by))
                    raise _refusal(found)
                self.journal.acknowledge()
                self._apply(self.machine.start(time.monotonic(), spec, by))
        return await self._started()

    async def stop(self, grace: float, by: str) -> State:
        """Stop and return when no process is left."""
        self._stops += 1
        self._apply(self.machine.stop(time.monotonic(), grace, by))
        await self._until(lambda: self.machine.phase != "stopping")
        return self.hub.state

    async def restart(self, grace: float, by: str) -> State:
        """Stop, start with the frozen specification, and return once the new process runs."""
        self.journal.acknowledge()
        self._apply(self.machine.restart(time.monotonic(), grace, by))
        await self._until(lambda: self.machine.phase != "stopping")
        if self.machine.phase == "stopped":
            raise RefusedError("stopped", "the restart was stopped by another command")
        return await self._started()

    async def ask_worker(self, op: Op, args: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Pass a command on to the worker.

        Raises:
            RefusedError: when there is none, it refuses, or it does not answer.
        """
        if self._link is None or self.machine.phase not in ("ready", "busy"):
            raise RefusedError("not_ready", "no server is ready", "Start one, or wait for it.")
        try:
            return await self._link.command(op, args, seconds)
        except WorkerRefusedError as refused:
            error = refused.error
            raise RefusedError(error.code, error.message, error.hint) from refused
        except WorkerGoneError as gone:
            raise RefusedError("no_answer", str(gone), "Look at the log.") from gone

    # ---- effects ----------------------------------------------------------------------------

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Publish(state):
                    self._publish_state(state)
                case Spawn(spec):
                    self._spawn(spec)
                case Drain(seconds):
                    self._spawn_task(self._drain(seconds))
                case Signal(kind):
                    if self._worker is not None:
                        self._worker.signal(kind)
                case Release():
                    self._release()
        self._changed.set()
        self._changed.clear()

    def _publish_state(self, state: State) -> None:
        before = self.hub.state
        self.hub.publish(state)
        if state.phase == "failed" and state.reason is not None:
            self.logs.say("error", f"failed: {state.reason.message} {state.reason.detail}".strip())
            if state.reason.code == "crash_loop":
                self.journal.gave_up(state.reason)
                self._save()
        elif state.phase != before.phase:
            self.logs.say("info", f"server {state.phase}")
        elif state.unresponsive != before.unresponsive:
            text = "no news from the worker" if state.unresponsive else "the worker is back"
            self.logs.say("warning", text)

    def _spawn(self, spec: LaunchSpec) -> None:
        now = time.monotonic()
        try:
            if self._listen is not None and self._bound != (spec.host, spec.port):
                self._release()
            if self._listen is None:
                self._bound = (spec.host, spec.port)
                self._listen = ports.bind(spec.host, spec.port)
                self._token = secrets.token_urlsafe(32)
                write_atomic(self.paths.token, self._token.encode())
            self.hub.history.new_run()
            worker = WorkerProcess(
                module=self._module,
                listen=self._listen,
                cwd=self.paths.state,
                on_line=self.logs.line_from_thread,
            )
        except ports.PortError as error:
            self._apply(self.machine.spawn_failed(now, error.fault))
            return
        except OSError as error:
            why = fault("internal", f"the worker could not be started: {error}")
            self._apply(self.machine.spawn_failed(now, why))
            return
        self._worker = worker
        self._record = self.journal.began(spec, worker.pid, worker.group, worker.command)
        self._save()
        self._link = WorkerLink(
            worker.link,
            Launch(spec, self._token, self._listen.fileno(), str(self.paths.state)),
            self._from_worker,
            self._link_ended,
        )
        link_ends = self._spawn_task(self._link.run())
        self._spawn_task(self._watch(worker, link_ends))
        self._apply(self.machine.spawned(time.monotonic(), worker.pid, spec.port))

    async def _watch(self, worker: WorkerProcess, link_ends: asyncio.Task[None]) -> None:
        status = await worker.wait()
        # What it sent last, such as why it gave up, may still be on its way to us.
        await asyncio.wait({link_ends}, timeout=LAST_WORDS_SECONDS)
        if self._link is not None:
            self._link.close()
        self._worker = self._link = None
        self.logs.flush_all()
        lines = self.logs.last_lines()
        record, self._record = self._record, None
        asked = self.machine.phase == "stopping"
        # The machine moves first, so that the record can say why.
        effects = self.machine.exited(time.monotonic(), status, random.random(), lines)  # noqa: S311
        if record is not None:
            outcome = "stopped" if asked else "crashed"
            self.journal.ended(record, outcome, self.machine.reason, list(lines))
            self._save()
        self._apply(effects)

    async def _drain(self, seconds: float) -> None:
        try:
            if self._link is not None:
                await self._link.command("drain", {"grace": seconds}, seconds)
        except (WorkerGoneError, WorkerRefusedError) as error:
            log.info("drain: %s", error)
            if isinstance(error, WorkerGoneError):
                return
        if self.machine.phase == "stopping":
            self._apply(self.machine.drained(time.monotonic()))

    def _release(self) -> None:
        if self._listen is not None:
            self._listen.close()
            self._listen = None
        self._token = ""
        self.paths.token.unlink(missing_ok=True)

    # ---- the worker -------------------------------------------------------------------------

    def _from_worker(self, message: Message) -> None:
        now = time.monotonic()
        match message:
            case Beat():
                self._apply(self.machine.heard(now))
            case Hello():
                self._apply(self.machine.greeted(now))
            case Progress(report):
                self._apply(self.machine.progressed(now, report))
                self.hub.publish(message)
            case Ready():
                self._apply(
                    self.machine.ready(now, message.port, message.warnings, message.calibration)
                )
            case Fatal(why):
                self._apply(self.machine.fatal(now, why))
            case Stats():
                self.hub.publish(message)
                self._apply(self.machine.load(now, message.running))
            case Log():
                self.logs.add(message)
            case _ if isinstance(message, Body):
                self.hub.publish(message)

    def _link_ended(self, problem: Fault | None) -> None:
        self._apply(self.machine.link_lost(time.monotonic(), problem))

    # ---- helpers of the shell ---------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            is_urgent = self.machine.phase in ("stopping", "backoff")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(URGENT_SECONDS if is_urgent else TICK_SECONDS):
                    await self._changed.wait()
            self._apply(self.machine.tick(time.monotonic()))

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._changed.wait()

    def _runs(self, spec: LaunchSpec) -> bool:
        return self.machine.phase in ALIVE and self.machine.spec == spec

    async def _started(self) -> State:
        """The state, once the journal knows of the process; raises if there is none."""
        if self._saved is not None:
            await asyncio.wrap_future(self._saved)
        if self.machine.phase == "failed" and self.machine.reason is not None:
            raise _refusal(self.machine.reason)
        return self.hub.state

    def _save(self) -> None:
        content = self.journal.content()

        def write() -> None:
            try:
                write_atomic(self.paths.journal, content)
                self._disk_failed = False
            except OSError as error:
                if not self._disk_failed:
                    self._disk_failed = True
                    self.logs.trouble_from_thread(
                        f"the journal cannot be written: {error.strerror}"
                    )

        self._saved = self._disk.submit(write)

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a task of the supervisor failed", exc_info=error)
            self.logs.say("error", f"fault of the supervisor: {error!r}")


def _refusal(why: Fault) -> RefusedError:
    message = f"{why.message} {why.detail}".strip()
    return RefusedError(why.code, message, why.hint)
