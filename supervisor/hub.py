"""The event stream: numbers every body, keeps what a reconnecting viewer may have missed.

`seq` counts up within one epoch, an epoch is one life of the supervisor. Each kind has its own
ring, so a flood of log lines never pushes out a change of state.
"""

import collections
import secrets
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from veloxquant.supervisor.history import History
from veloxquant.supervisor.logs import cut
from veloxquant.supervisor.messages import (
    Body,
    Event,
    Gap,
    Kind,
    Log,
    Profile,
    Progress,
    Request,
    Snapshot,
    State,
    Stats,
)

LOG_RECORDS = 10_000
LOG_CHARS = 8 << 20
SNAPSHOT_LOGS = 1_000
SNAPSHOT_LOG_CHARS = 96 << 10  # at worst six bytes each on the wire
SNAPSHOT_REQUESTS = 200
_RING: dict[Kind, int] = {
    "state": 1_000,
    "log": LOG_RECORDS,
    "stats": 64,
    "profile": 4,
    "progress": 200,
    "request": 2_000,
}
# Kinds of which every event counts; of the others only the newest is of use.
LOSSLESS: frozenset[Kind] = frozenset({"state", "log", "request"})
_KINDS: dict[type, Kind] = {
    State: "state",
    Stats: "stats",
    Log: "log",
    Progress: "progress",
    Request: "request",
    Profile: "profile",
}


class Ring(NamedTuple):
    """Newest events of one kind."""

    events: collections.deque[Event]
    limit: int


def kind_of(body: Body) -> Kind:
    """Which stream a body belongs to; a gap belongs to the stream it is in."""
    return body.kind if isinstance(body, Gap) else _KINDS[type(body)]


class Hub:
    """Numbers events, keeps rings of them, and hands them to the viewers at once."""

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(8)
        self.seq = 0
        self.history = History()
        self.state = State("stopped")
        self.dropped_logs = 0
        self._listeners: list[Callable[[Event, Kind], None]] = []
        self._rings = {kind: Ring(collections.deque(), n) for kind, n in _RING.items()}
        self._lost_to: dict[Kind, int] = dict.fromkeys(_RING, 0)
        self._log_chars = 0

    def publish(self, body: Body) -> Event:
        """Number a body, keep it, and pass it on; never waits for anyone."""
        kind = kind_of(body)
        if isinstance(body, Log):
            body.text = cut(body.text)
            self._log_chars += len(body.text)
        elif isinstance(body, State):
            self.state = body
        elif isinstance(body, Stats):
            self.history.add(time.monotonic(), body)
        elif isinstance(body, Gap) and kind == "log":
            self.dropped_logs += body.count
        self.seq += 1
        event = Event(self.epoch, self.seq, time.monotonic(), body)
        self._keep(kind, event)
        for listener in self._listeners:
            listener(event, kind)
        return event

    def listen(self, listener: Callable[[Event, Kind], None]) -> None:
        """Call `listener` for every event from now on."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[Event, Kind], None]) -> None:
        """Stop calling it."""
        self._listeners.remove(listener)

    def since(self, epoch: str, seq: int, kinds: Iterable[Kind]) -> list[Event] | None:
        """Events after `seq` in order, or None when some that count are no longer there."""
        kinds = list(kinds)
        if epoch != self.epoch or seq > self.seq:
            return None
        if any(self._lost_to[kind] > seq for kind in kinds if kind in LOSSLESS):
            return None
        missed = [e for kind in kinds for e in self._rings[kind].events if e.seq > seq]
        return sorted(missed, key=lambda event: event.seq)

    def snapshot(self, kinds: Iterable[Kind]) -> Snapshot:
        """Everything a new viewer of these kinds needs; it includes all events up to now."""
        kinds = set(kinds)
        return Snapshot(
            epoch=self.epoch,
            seq=self.seq,
            state=self.state,
            stats=self.history.latest if "stats" in kinds else None,
            logs=self._newest_logs() if "log" in kinds else [],
            history=self.history.points() if "stats" in kinds else [],
            requests=self._newest_requests() if "request" in kinds else [],
        )

    def logs(self) -> list[Event]:
        """Log events in the ring, oldest first; gaps among them."""
        return list(self._rings["log"].events)

    def _keep(self, kind: Kind, event: Event) -> None:
        ring = self._rings[kind]
        ring.events.append(event)
        while len(ring.events) > ring.limit or (kind == "log" and self._log_chars > LOG_CHARS):
            oldest = ring.events.popleft()
            self._lost_to[kind] = oldest.seq
            if isinstance(oldest.body, Log):
                self._log_chars -= len(oldest.body.text)

    def _newest_logs(self) -> list[Event]:
        out: list[Event] = []
        chars = 0
        for event in reversed(self._rings["log"].events):
            chars += len(event.body.text) if isinstance(event.body, Log) else 0
            if len(out) == SNAPSHOT_LOGS or chars > SNAPSHOT_LOG_CHARS:
                break
            out.append(event)
        return out[::-1]

    def _newest_requests(self) -> list[Request]:
        latest: dict[str, Request] = {}
        for event in self._rings["request"].events:
            if isinstance(event.body, Request):
                latest.pop(event.body.id, None)
                latest[event.body.id] = event.body
        return list(latest.values())[-SNAPSHOT_REQUESTS:]
