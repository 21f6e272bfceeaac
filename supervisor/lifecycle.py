"""The life of one server as a state machine without input or output.

    stopped → starting → loading → ready ⇄ busy → stopping → stopped
    from any running phase → crashed → backoff → starting, or → failed (final until a command)

Each input is a method that takes the time and returns effects; the controller carries them out.
`unresponsive` is a flag, not a phase. All times are monotonic seconds.
"""

from dataclasses import dataclass, field
from typing import get_args

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
from veloxquant.supervisor.failures import FAILURES, fault, of_exit
from veloxquant.supervisor.messages import (
    Fault,
    LaunchSpec,
    Phase,
    Stage,
    StageReport,
    State,
)
from veloxquant.supervisor.policy import Policy, Retry, decide, recent

RUNNING: frozenset[Phase] = frozenset({"starting", "loading", "ready", "busy"})
SERVING: frozenset[Phase] = frozenset({"ready", "busy"})
ALIVE: frozenset[Phase] = frozenset({*RUNNING, "stopping"})


def _fresh_stages() -> dict[Stage, StageReport]:
    return {stage: StageReport(stage, "next") for stage in get_args(Stage)}


@dataclass
class Machine:
    """Phase, what led to it, and every deadline."""

    policy: Policy = field(default_factory=Policy)
    limits: Limits = field(default_factory=Limits)
    phase: Phase = "stopped"
    reason: Fault | None = None
    spec: LaunchSpec | None = None
    pid: int | None = None
    port: int | None = None
    restarts: int = 0
    unresponsive: bool = False
    moves: int = 0
    since: float = 0.0
    ready_at: float | None = None
    stages: dict[Stage, StageReport] = field(default_factory=_fresh_stages)
    warnings: list[str] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)
    asked_by: str = ""
    calibration: str = ""
    crashes: tuple[float, ...] = ()
    _blame: Fault | None = None
    _again: bool = False
    _termed: bool = False
    _killed: bool = False
    _last_tick: float | None = None
    _heard_at: float | None = None
    _retry_at: float | None = None
    _stall_at: float | None = None
    _term_at: float | None = None
    _kill_at: float | None = None

    def state(self, now: float) -> State:
        """The state as viewers see it."""
        retry = None if self._retry_at is None else max(0.0, self._retry_at - now)
        return State(
            phase=self.phase,
            reason=self.reason,
            spec=self.spec,
            pid=self.pid,
            port=self.port,
            restarts=self.restarts,
            unresponsive=self.unresponsive,
            moves=self.moves,
            since=self.since,
            retry_in=retry,
            ready_at=self.ready_at,
            stages=list(self.stages.values()),
            warnings=list(self.warnings),
            last_lines=list(self.last_lines),
            asked_by=self.asked_by,
            calibration=self.calibration,
        )

    # ---- commands ---------------------------------------------------------------------------

    def start(self, now: float, spec: LaunchSpec, by: str = "") -> list[Effect]:
        """Start with `spec`; nothing happens when it runs with the same one already.

        Raises:
            RefusedError: when a server runs with another specification, or is stopping.
        """
        self.check_startable(spec)
        if self.phase in RUNNING:
            return []
        self.spec, self.asked_by = spec, by
        self.restarts, self.crashes = 0, ()
        return self._launch(now)

    def check_startable(self, spec: LaunchSpec) -> None:
        """Raise `RefusedError` when a start with `spec` cannot be asked for now."""
        if self.phase in RUNNING and spec != self.spec:
            raise RefusedError(
                "already_running",
                f"a server for {self.spec.model if self.spec else '?'} is already {self.phase}",
                "Stop it first, then start with the other settings.",
            )
        if self.phase == "stopping":
            raise RefusedError(
                "already_running",
                "the server is stopping",
                "Wait until it has stopped, or use restart.",
            )

    def stop(self, now: float, grace: float, by: str = "") -> list[Effect]:
        """Stop; wins over a start that is under way, and over a restart."""
        self._again = False
        self.asked_by = by
        return self._stop(now, grace)

    def restart(self, now: float, grace: float, by: str = "") -> list[Effect]:
        """Stop, then start with the same specification.

        Raises:
            RefusedError: when nothing was ever started.
        """
        if self.spec is None:
            raise RefusedError("nothing_to_restart", "no server was started", "Start one first.")
        self.asked_by = by
        if self.phase in ALIVE:
            self._again = True
            return self._stop(now, grace) if self.phase != "stopping" else []
        return self.start(now, self.spec, by)

    def refuse(self, now: float, spec: LaunchSpec, why: Fault, by: str = "") -> list[Effect]:
        """A start that was found impossible before a process existed: `failed` at once."""
        if self.phase in ALIVE:
            return []
        self.spec, self.asked_by = spec, by
        self._clear()
        return self._fail(now, why)

    # ---- what the process and the worker tell -----------------------------------------------

    def spawned(self, now: float, pid: int, port: int) -> list[Effect]:
        """The process exists."""
        self.pid, self.port = pid, port
        self.stages["process"] = StageReport("process", "done", f"pid {pid}", seconds=0.0)
        self._stall_at = now + self.limits.stage
        return [Publish(self.state(now))]

    def spawn_failed(self, now: float, why: Fault) -> list[Effect]:
        """There is no process, for a reason that trying again will not change."""
        return self._fail(now, why)

    def greeted(self, now: float) -> list[Effect]:
        """The worker said hello: from here it must beat."""
        self._heard_at = now
        if self.phase != "starting":
            return []
        self._stall_at = now + self.limits.stage
        return self._move(now, "loading")

    def progressed(self, now: float, report: StageReport) -> list[Effect]:
        """A start-up stage moved: the stall budget starts anew."""
        self.stages[report.stage] = report
        if report.state == "warned" and report.detail:
            self.warnings.append(report.detail)
        if self.phase in ("starting", "loading"):
            self._stall_at = now + self.limits.of_report(report)
        return self._move(now, "loading") if self.phase == "starting" else []

    def ready(
        self, now: float, port: int, warnings: list[str], calibration: str = ""
    ) -> list[Effect]:
        """The worker answered its own trial token and listens."""
        if self.phase not in ("starting", "loading"):
            return []
        self.port, self.ready_at, self.calibration = port, now, calibration
        self.warnings += [w for w in warnings if w not in self.warnings]
        for stage, report in self.stages.items():
            if report.state in ("next", "now"):
                self.stages[stage] = StageReport(stage, "done", report.detail)
        self._stall_at = None
        return self._move(now, "ready")

    def load(self, now: float, running: int) -> list[Effect]:
        """Number of requests that are being answered."""
        if self.phase == "ready" and running > 0:
            return self._move(now, "busy")
        if self.phase == "busy" and running == 0:
            return self._move(now, "ready")
        return []

    def heard(self, now: float) -> list[Effect]:
        """A heartbeat."""
        self._heard_at = now
        if not self.unresponsive:
            return []
        self.unresponsive = False
        return [Publish(self.state(now))]

    def fatal(self, now: float, why: Fault) -> list[Effect]:
        """The worker says why it is about to exit; it has a moment to do so."""
        self._blame = self._blame or why
        self._kill_at = _earlier(self._kill_at, now + self.limits.farewell)
        return []

    def link_lost(self, now: float, why: Fault | None) -> list[Effect]:
        """The link ended, or broke the protocol (`why`): then the worker is killed."""
        if self.phase not in RUNNING:
            return []
        if why is None:
            self._kill_at = _earlier(self._kill_at, now + self.limits.farewell)
            return []
        self._blame = self._blame or why
        return self._kill()

    def drained(self, now: float) -> list[Effect]:
        """Running answers are done: the rest of the grace is not needed."""
        self._term_at = now if self._term_at is not None else None
        return self.tick(now)

    def exited(
        self, now: float, status: int, jitter: float = 0.5, last_lines: tuple[str, ...] = ()
    ) -> list[Effect]:
        """The process is gone and reaped; `status` is its exit code, or minus the signal."""
        if self.phase not in ALIVE:
            return []
        was_stopping, blame = self.phase == "stopping", self._blame
        was_ready = self.ready_at
        self._clear()
        if was_stopping:
            out = self._move(now, "stopped")
            if self._again and self.spec is not None:
                return out + self.start(now, self.spec, self.asked_by)
            return [*out, Release()]
        if was_ready is not None and now - was_ready >= self.policy.steady:
            self.crashes = ()
        known = of_exit(status)
        why = blame or Fault(known.code, known.message, known.hint, f"exit status {status}")
        self.last_lines = list(last_lines)
        heals = FAILURES[why.code].heals if why.code in FAILURES else True
        self._mark_failed_stage()
        choice = decide(self.crashes, now, heals=heals, jitter=jitter, policy=self.policy)
        self.reason = why
        out = self._move(now, "crashed")
        if isinstance(choice, Retry):
            self.crashes = (*recent(self.crashes, now, self.policy), now)
            self._retry_at = now + choice.delay
            return out + self._move(now, "backoff")
        if choice.looped:
            why = fault("crash_loop", f"{why.message} {why.detail}".strip())
        return out + self._fail(now, why)

    # ---- time -------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Carry out what is due; called several times a second."""
        last, self._last_tick = self._last_tick, now
        if last is not None and now - last > self.limits.slept:
            self._shift(now - last)
        if self.phase == "backoff" and _due(self._retry_at, now):
            self.restarts += 1
            return self._launch(now)
        if self.phase == "stopping":
            return self._tick_stopping(now)
        if self.phase not in RUNNING:
            return []
        if self.phase in ("starting", "loading") and _due(self._stall_at, now):
            at = [s for s, r in self.stages.items() if r.state == "now"] or ["process"]
            self._blame = self._blame or fault("stalled", f"no progress in the stage {at[-1]}")
            return self._kill()
        if _due(self._kill_at, now):
            return self._kill()
        if self.phase in SERVING and self.ready_at is not None:
            self.crashes = () if now - self.ready_at >= self.policy.steady else self.crashes
        return self._tick_heartbeat(now)

    def _tick_heartbeat(self, now: float) -> list[Effect]:
        if self._heard_at is None:
            return []
        silent = now - self._heard_at
        if silent >= self.limits.dead:
            self._blame = self._blame or fault("unresponsive", f"silent for {silent:.0f} s")
            return self._kill()
        if silent > self.limits.silent and not self.unresponsive:
            self.unresponsive = True
            return [Publish(self.state(now)), Signal("stack")]
        return []

    def _tick_stopping(self, now: float) -> list[Effect]:
        if _due(self._kill_at, now):
            return self._kill()
        if _due(self._term_at, now) and not self._termed:
            self._termed = True
            return [Signal("term")]
        return []

    def _shift(self, gap: float) -> None:
        """Move every deadline: the machine slept."""
        for name in ("_heard_at", "_retry_at", "_stall_at", "_term_at", "_kill_at"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, value + gap)

    # ---- transitions ------------------------------------------------------------------------

    def _move(self, now: float, phase: Phase) -> list[Effect]:
        self.phase, self.since = phase, now
        self.moves += 1
        return [Publish(self.state(now))]

    def _launch(self, now: float) -> list[Effect]:
        assert self.spec is not None, f"launch without a specification in phase {self.phase}"
        self._clear()
        self._again = False
        self.reason, self.warnings, self.last_lines = None, [], []
        self.stages = _fresh_stages()
        self.stages["process"] = StageReport("process", "now")
        self._stall_at = now + self.limits.stage
        return [*self._move(now, "starting"), Spawn(self.spec)]

    def _stop(self, now: float, grace: float) -> list[Effect]:
        if self.phase in ("stopped", "failed", "backoff", "crashed"):
            if self.phase == "stopped":
                return []
            self._clear()
            self.reason = None
            return [*self._move(now, "stopped"), Release()]
        if self.phase in SERVING:
            term, drain = now + grace, [Drain(grace)] if grace > 0 else []
        else:
            # Nothing to finish in a worker that still loads, or is stopping already.
            grace = grace if self.phase == "stopping" else min(grace, self.limits.load_stop)
            term, drain = now + (grace if self.phase == "stopping" else 0.0), []
        self._term_at = _earlier(self._term_at, term)
        self._kill_at = _earlier(self._kill_at, now + grace + self.limits.kill_after)
        moved = self._move(now, "stopping") if self.phase != "stopping" else []
        return [*moved, *drain, *self._tick_stopping(now)]

    def _fail(self, now: float, why: Fault) -> list[Effect]:
        self._clear()
        self.reason = why
        return [*self._move(now, "failed"), Release()]

    def _kill(self) -> list[Effect]:
        if self._killed:
            return []
        self._killed = True
        return [Signal("kill")]

    def _mark_failed_stage(self) -> None:
        for stage, report in self.stages.items():
            if report.state == "now":
                self.stages[stage] = StageReport(stage, "failed", report.detail)

    def _clear(self) -> None:
        """Forget the process and every deadline."""
        self.pid = self.port = self.ready_at = self._blame = None
        self.calibration = ""
        self.unresponsive = self._termed = self._killed = False
        self._heard_at = self._retry_at = self._stall_at = self._term_at = self._kill_at = None


def _due(deadline: float | None, now: float) -> bool:
    return deadline is not None and now >= deadline


def _earlier(old: float | None, new: float) -> float:
    return new if old is None else min(old, new)
