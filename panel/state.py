"""What the panel knows, as one immutable value folded from the supervisor's messages.

Pure: `fold(view, messages, now)` has no clock, socket or widget, so a recording replays exactly.
Foreign text of logs is cleaned here, once; model names and errors are cleaned where they are
drawn, because their raw form goes back to the supervisor on a restart.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import msgspec

from veloxquant.panel.text import MAX_LINE, clean
from veloxquant.supervisor.messages import (
    Event,
    Fault,
    Gap,
    HistoryPoint,
    LaunchSpec,
    Log,
    Profile,
    Progress,
    Request,
    Snapshot,
    StageReport,
    State,
    Stats,
)

MAX_LOGS = 10_000
MAX_HISTORY = 600
MAX_REQUESTS = 200
STALE_AFTER = 5.0
SILENT_AFTER = 10.0
GAP_WARN = 0.15
# below this the gap between claimed and resident bytes is allocator noise
GAP_FLOOR = 4 << 20

Link = Literal["connecting", "live", "lost", "refused"]
Freshness = Literal["fresh", "stale", "silent"]

RUNNING = frozenset({"starting", "loading", "ready", "busy", "stopping"})
SERVING = frozenset({"ready", "busy"})
BROKEN = frozenset({"crashed", "failed", "backoff"})
OPEN_REQUESTS = frozenset({"queued", "prefill", "decode"})


class LinkNews(NamedTuple):
    """The connection to the supervisor came or went; `reason` is a sentence for people."""

    up: bool
    reason: str = ""


class LogLine(NamedTuple):
    """One cleaned log line; `seq` is its place in the stream, `wall` seconds since 1970."""

    seq: int
    wall: float
    level: str
    source: str
    text: str
    request: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Everything the screens draw; a new value is a new object.

    Times named `_at` are of this process's monotonic clock.
    """

    link: Link = "connecting"
    link_note: str = ""
    epoch: str = ""
    seq: int = 0
    server: State = field(default_factory=lambda: State(phase="stopped"))
    stats: Stats | None = None
    heard_at: float = 0.0
    phase_at: float = 0.0
    history: tuple[HistoryPoint, ...] = ()
    logs: tuple[LogLine, ...] = ()
    log_total: int = 0
    requests: tuple[Request, ...] = ()
    profile: Profile | None = None
    # a start that was refused before the supervisor had a state for it
    refused: Fault | None = None
    refused_spec: LaunchSpec | None = None
    # the connection went down, and what ran when its supervisor ended with it
    down_at: float = 0.0
    lost_spec: LaunchSpec | None = None
    lost_at: float = 0.0

    @property
    def spec(self) -> LaunchSpec | None:
        """What the server runs with, or was last asked to run with."""
        return self.server.spec

    @property
    def model_name(self) -> str:
        """Short printable name of the model that runs or ran."""
        return model_name(self.spec.name or self.spec.model) if self.spec else ""

    @property
    def is_running(self) -> bool:
        """Whether a worker process exists."""
        return self.server.phase in RUNNING

    @property
    def is_serving(self) -> bool:
        """Whether requests are answered."""
        return self.server.phase in SERVING

    @property
    def fault(self) -> Fault | None:
        """Why nothing runs, if something went wrong."""
        if self.refused is not None:
            return self.refused
        if self.server.phase in BROKEN:
            return self.server.reason or Fault(
                code="crashed",
                message="The server ended without saying why.",
                hint="Look at the log.",
            )
        return None

    @property
    def base_url(self) -> str:
        """Where OpenAI clients connect."""
        if self.spec is None:
            return ""
        host = self.spec.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.server.port or self.spec.port}/v1"


def model_name(model: str) -> str:
    """The last part of a model's folder or Hub id, printable."""
    parts = [part for part in model.replace("\\", "/").split("/") if part]
    if len(parts) > 2 and parts[-2] == "snapshots":  # Hub cache: models--org--name/snapshots/hash
        return clean(parts[-3].removeprefix("models--").split("--")[-1], 80)
    return clean(parts[-1] if parts else model, 80)


def freshness(view: View, now: float) -> Freshness:
    """Whether the gauges may be believed; only a running worker can be late."""
    if view.server.unresponsive:
        return "silent"
    if view.server.phase not in SERVING:
        return "fresh"
    age = now - view.heard_at
    return "silent" if age >= SILENT_AFTER else "stale" if age >= STALE_AFTER else "fresh"


def kv_held(stats: Stats) -> int:
    """Measured bytes of the cache; a few kilobytes with nothing claimed are noise."""
    if stats.kv_claimed <= 0 and stats.kv_resident <= GAP_FLOOR:
        return 0
    return stats.kv_resident


def kv_gap(stats: Stats) -> float:
    """How much more the cache holds than its methods claim, as a share of the claim."""
    if abs(stats.kv_resident - stats.kv_claimed) <= GAP_FLOOR or stats.kv_claimed <= 0:
        return 0.0
    return stats.kv_resident / stats.kv_claimed - 1.0


def fold(view: View, messages: Iterable[Any], now: float) -> View:
    """The view after `messages`, in order; repeated and foreign-epoch events change nothing."""
    logs: list[LogLine] = []
    for message in messages:
        if isinstance(message, LinkNews):
            link: Link = "live" if message.up else "lost"
            down_at = now if link == "lost" and view.link == "live" else view.down_at
            view = replace(view, link=link, link_note=clean(message.reason, 300), down_at=down_at)
        elif isinstance(message, Snapshot):
            view, logs = _from_snapshot(view, message, now), []
        elif isinstance(message, Event):
            if message.epoch != view.epoch or message.seq <= view.seq:
                continue
            view = _fold_event(view, message, logs, now)
    return _with_logs(view, logs) if logs else view


def _with_logs(view: View, logs: list[LogLine]) -> View:
    return replace(
        view, logs=(view.logs + tuple(logs))[-MAX_LOGS:], log_total=view.log_total + len(logs)
    )


def _from_snapshot(view: View, snap: Snapshot, now: float) -> View:
    same = snap.epoch == view.epoch
    logs = [_line(event) for event in snap.logs]
    lines = tuple(line for line in logs if line is not None)
    if same and view.logs and lines:
        # a reconnect to the same supervisor: keep older lines that the snapshot no longer has
        lines = tuple(line for line in view.logs if line.seq < lines[0].seq) + lines
    lost = not same and view.is_running and snap.state.phase == "stopped"
    gone = snap.state.phase != "stopped"
    return View(
        lost_spec=None if gone else view.spec if lost else view.lost_spec,
        lost_at=(view.down_at or now) if lost else view.lost_at,
        link="live",
        epoch=snap.epoch,
        seq=snap.seq,
        server=snap.state,
        stats=snap.stats,
        heard_at=now,
        phase_at=now,
        history=tuple(snap.history)[-MAX_HISTORY:],
        logs=lines[-MAX_LOGS:],
        log_total=len(lines),
        requests=tuple(snap.requests)[-MAX_REQUESTS:],
        profile=view.profile if same else None,
        refused=view.refused,
        refused_spec=view.refused_spec,
    )


def _fold_event(view: View, event: Event, logs: list[LogLine], now: float) -> View:
    view = replace(view, seq=event.seq)
    match event.body:
        case State() as state:
            fresh = state.phase != view.server.phase
            ended = state.phase in ("starting", "stopped") and fresh
            return replace(
                view,
                server=state,
                heard_at=now,
                phase_at=now if fresh else view.phase_at,
                # gauges of a process that is gone would be a lie
                stats=None if ended else view.stats,
                requests=() if ended and state.phase == "starting" else view.requests,
                profile=None if ended else view.profile,
                refused=None,
                refused_spec=None,
                lost_spec=view.lost_spec if state.phase == "stopped" else None,
            )
        case Stats() as stats:
            return replace(
                view, stats=stats, heard_at=now, history=_grow(view.history, event.t, stats)
            )
        case Progress(report=report):
            stages = _merge_stage(view.server.stages, report)
            return replace(view, server=_with_stages(view.server, stages), heard_at=now)
        case Request() as request:
            return replace(view, requests=_merge_request(view.requests, request), heard_at=now)
        case Profile() as profile:
            return replace(view, profile=profile, heard_at=now)
        case Log() | Gap():
            line = _line(event)
            if line is not None:
                logs.append(line)
            return view
    return view


def _line(event: Event) -> LogLine | None:
    match event.body:
        case Log() as log:
            return LogLine(
                event.seq,
                log.wall,
                log.level,
                clean(log.source, 16),
                clean(log.text, MAX_LINE),
                clean(log.request, 64),
            )
        case Gap(kind="log", count=count):
            text = f"{count:,} log lines were dropped here: this viewer read too slowly"
            return LogLine(event.seq, 0.0, "warning", "panel", text)
    return None


def _grow(history: tuple[HistoryPoint, ...], t: float, stats: Stats) -> tuple[HistoryPoint, ...]:
    """History with one point a second; within the second the newest values win nothing."""
    if history and t - history[-1].t < 1.0:
        return history
    point = HistoryPoint(
        t,
        stats.footprint,
        stats.weights,
        stats.kv_claimed,
        stats.kv_resident,
        stats.decode_tps,
        stats.prefill_tps,
    )
    return (*history, point)[-MAX_HISTORY:]


def _merge_stage(stages: list[StageReport], report: StageReport) -> list[StageReport]:
    if any(stage.stage == report.stage for stage in stages):
        return [report if stage.stage == report.stage else stage for stage in stages]
    return [*stages, report]


def _with_stages(state: State, stages: list[StageReport]) -> State:
    return msgspec.structs.replace(state, stages=stages)


def _merge_request(requests: tuple[Request, ...], new: Request) -> tuple[Request, ...]:
    for index, old in enumerate(requests):
        if old.id == new.id:
            return (*requests[:index], new, *requests[index + 1 :])
    return (*requests, new)[-MAX_REQUESTS:]
