"""What waits to be sent to one viewer: bounded by kind, so that nobody slows anybody else.

State changes are never dropped: a viewer too far behind is told to come again. Log lines and
requests drop their oldest and leave a gap; of gauges and stages only the newest is kept.
"""

import asyncio
import collections
from collections.abc import Iterable

from veloxquant.supervisor.messages import (
    Event,
    Gap,
    Kind,
    Log,
    Message,
    Progress,
)

MAX_STATES = 1_000
MAX_REPLIES = 256
MAX_RECORDS = 10_000
MAX_CHARS = 1 << 20
BATCH_EVENTS = 64
BATCH_CHARS = 96 << 10


class TooFarBehindError(RuntimeError):
    """Raised when a viewer must be closed; `code` is of `CLOSE_CODES`."""

    def __init__(self, code: int) -> None:
        super().__init__(f"viewer closed with {code}")
        self.code = code


class Outbox:
    """Queues of one viewer. `put` never waits; `take` gives what is next, in order."""

    def __init__(self) -> None:
        self.kinds: frozenset[Kind] = frozenset()
        self.overrun = 0
        self._replies: collections.deque[Message] = collections.deque()
        self._states: collections.deque[Event] = collections.deque()
        self._newest: dict[str, Event] = {}
        self._records: dict[Kind, collections.deque[Event]] = {
            "log": collections.deque(),
            "request": collections.deque(),
        }
        self._gaps: dict[Kind, Event] = {}
        self._chars = 0
        self._some = asyncio.Event()

    def reply(self, message: Message) -> None:
        """Queue an answer; answers go before events."""
        self._replies.append(message)
        if len(self._replies) > MAX_REPLIES:
            self.overrun = 4408
        self._some.set()

    def put(self, event: Event, kind: Kind) -> None:
        """Queue an event if this viewer wants its kind."""
        if kind not in self.kinds:
            return
        if kind == "state":
            self._states.append(event)
            if len(self._states) > MAX_STATES:
                self.overrun = 4409
        elif (records := self._records.get(kind)) is not None:
            records.append(event)
            if isinstance(event.body, Log):
                self._chars += len(event.body.text)
            while len(records) > MAX_RECORDS or (kind == "log" and self._chars > MAX_CHARS):
                self._drop(kind, records.popleft())
        else:
            self._newest[_key(event, kind)] = event
        self._some.set()

    def extend(self, events: Iterable[Event], kinds: Iterable[Kind]) -> None:
        """Queue missed events of the kinds given with them, in order."""
        for event, kind in zip(events, kinds, strict=True):
            self.put(event, kind)

    async def wait(self) -> None:
        """Return when there is something to send."""
        await self._some.wait()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not (
            self._replies
            or self._states
            or self._newest
            or self._gaps
            or any(self._records.values())
        )

    @property
    def size(self) -> int:
        """Number of messages that wait."""
        queued = len(self._replies) + len(self._states) + len(self._newest)
        return queued + sum(len(records) for records in self._records.values())

    def take(self) -> list[Message]:
        """The next batch: answers first, then events by number.

        Raises:
            TooFarBehindError: when this viewer lost something it must not lose.
        """
        if self.overrun:
            raise TooFarBehindError(self.overrun)
        if self._replies:
            return [self._replies.popleft()]
        batch: list[Message] = []
        chars = 0
        logs = self._records["log"]
        if logs and not (self._states or self._newest or self._gaps or self._records["request"]):
            # Only lines wait, as in a flood: no order to work out.
            while logs and len(batch) < BATCH_EVENTS and chars < BATCH_CHARS:
                event = logs.popleft()
                batch.append(event)
                size = len(event.body.text) if isinstance(event.body, Log) else 0
                self._chars -= size
                chars += size or 200
        while len(batch) < BATCH_EVENTS and chars < BATCH_CHARS:
            event = self._next()
            if event is None:
                break
            batch.append(event)
            chars += len(event.body.text) if isinstance(event.body, Log) else 200
        if self.is_empty:
            self._some.clear()
        return batch

    def _next(self) -> Event | None:
        heads: list[tuple[int, str, Kind | str]] = []
        if self._states:
            heads.append((self._states[0].seq, "state", ""))
        heads += [(gap.seq, "gap", kind) for kind, gap in self._gaps.items()]
        heads += [(q[0].seq, "record", kind) for kind, q in self._records.items() if q]
        heads += [(event.seq, "newest", key) for key, event in self._newest.items()]
        if not heads:
            return None
        _, source, key = min(heads)
        if source == "state":
            return self._states.popleft()
        if source == "gap":
            return self._gaps.pop(key)  # type: ignore[arg-type]
        if source == "newest":
            return self._newest.pop(key)
        event = self._records[key].popleft()  # type: ignore[index]
        if isinstance(event.body, Log):
            self._chars -= len(event.body.text)
        return event

    def _drop(self, kind: Kind, event: Event) -> None:
        """Count a dropped record into the gap that stands in its place."""
        count = event.body.count if isinstance(event.body, Gap) else 1
        if isinstance(event.body, Log):
            self._chars -= len(event.body.text)
        before = self._gaps.get(kind)
        if before is not None and isinstance(before.body, Gap):
            count += before.body.count
        self._gaps[kind] = Event(event.epoch, event.seq, event.t, Gap(kind, count), event.server)


def _key(event: Event, kind: Kind) -> str:
    return f"progress/{event.body.report.stage}" if isinstance(event.body, Progress) else kind
