"""What the state machine asks its shell to do, its time limits, and how it refuses."""

from typing import Literal, NamedTuple

from veloxquant.supervisor.messages import LaunchSpec, StageReport, State


class Limits(NamedTuple):
    """Time limits of a server, seconds.

    `stage` is how long a start-up stage may go without progress; for the trial token and the
    listening it is `short_stage`, for a piece of the trial prompt `chunk`. A worker that is asked
    to stop is killed `kill_after` past its grace; one that said `Fatal` or closed its link has
    `farewell` to exit. `slept` between two ticks means that the machine was suspended.
    """

    stage: float = 300.0
    chunk: float = 120.0
    short_stage: float = 60.0
    silent: float = 10.0
    dead: float = 120.0
    slept: float = 30.0
    kill_after: float = 0.7
    load_stop: float = 2.0
    farewell: float = 2.0

    def of_report(self, report: StageReport) -> float:
        """Seconds until the next report must come."""
        if report.state != "now" or report.stage not in ("canary", "listen"):
            return self.stage
        return self.short_stage if report.total is None else self.chunk


class Publish(NamedTuple):
    """Tell every viewer the new state."""

    state: State


class Spawn(NamedTuple):
    """Start the worker process; answer with `spawned` or `spawn_failed`."""

    spec: LaunchSpec


class Drain(NamedTuple):
    """Ask the worker to finish its answers; answer with `drained`."""

    seconds: float


class Signal(NamedTuple):
    """Send a signal: `term` and `kill` to the whole group, `stack` asks for a stack dump."""

    kind: Literal["term", "kill", "stack"]


class Release(NamedTuple):
    """Give up what outlives a worker: the listening socket and the token."""


Effect = Publish | Spawn | Drain | Signal | Release


class RefusedError(ValueError):
    """Raised when a command does not fit the phase; `code` and `hint` go to the asker."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint
