import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxquant.supervisor.hub import LOG_RECORDS, Hub
from veloxquant.supervisor.messages import (
    MAX_LOG_CHARS,
    MAX_MESSAGE_BYTES,
    Event,
    Gap,
    Log,
    Progress,
    Request,
    Snapshot,
    StageReport,
    State,
    Stats,
    encode,
)
from veloxquant.supervisor.viewers import MAX_RECORDS, MAX_STATES, Outbox, TooFarBehindError

KINDS = ["state", "log", "stats", "profile", "progress", "request"]


def log(text: str) -> Log:
    return Log("info", "a", text)


def drain(outbox: Outbox) -> list:
    out = []
    while not outbox.is_empty:
        out += outbox.take()
    return out


def test_missed_events_follow_in_order_and_nothing_twice():
    hub = Hub()
    for n in range(10):
        hub.publish(log(str(n)))
        hub.publish(State("ready", moves=n))
    events = hub.since(hub.epoch, 7, KINDS)
    assert events is not None
    assert [e.seq for e in events] == list(range(8, 21))


@pytest.mark.parametrize(("epoch", "seq"), [("another", 0), (None, 10**9)])
def test_unknown_place_in_the_stream_needs_a_snapshot(epoch, seq):
    hub = Hub()
    hub.publish(log("a"))
    assert hub.since(epoch or hub.epoch, seq, KINDS) is None


def test_lost_log_lines_need_a_snapshot_lost_gauges_do_not():
    hub = Hub()
    hub.publish(log("first"))
    for n in range(100):
        hub.publish(Stats(footprint=n))
    assert hub.since(hub.epoch, 1, KINDS) is not None
    for n in range(LOG_RECORDS + 1):
        hub.publish(log(str(n)))
    assert hub.since(hub.epoch, 1, KINDS) is None
    assert hub.since(hub.epoch, 1, ["stats"]) is not None


def test_ring_of_logs_is_bounded_in_characters_too():
    hub = Hub()
    for _ in range(1_000):
        hub.publish(log("x" * (MAX_LOG_CHARS + 500)))
    kept = hub.logs()
    assert len(kept) == (8 << 20) // MAX_LOG_CHARS
    assert all(isinstance(e.body, Log) and len(e.body.text) == MAX_LOG_CHARS for e in kept)


def test_snapshot_fits_into_one_message_whatever_the_logs_hold():
    hub = Hub()
    for n in range(2_000):
        hub.publish(log("\x1b" * 1_000))
        hub.publish(Request(str(n), "done"))
    for t in range(900):
        hub.history.add(float(t), Stats(footprint=1 << 40, weights=1 << 40))
    snapshot = hub.snapshot(KINDS)
    assert len(encode(snapshot)) <= MAX_MESSAGE_BYTES
    assert snapshot.seq == hub.seq
    assert len(snapshot.requests) == 200
    assert snapshot.requests[-1].id == "1999"


def test_viewer_gets_states_all_gauges_newest_and_gaps_where_lines_are_missing():
    hub, outbox = Hub(), Outbox()
    outbox.kinds = frozenset(KINDS)
    hub.listen(outbox.put)
    for n in range(MAX_RECORDS + 500):
        hub.publish(log(str(n)))
    for n in range(50):
        hub.publish(Stats(footprint=n))
        hub.publish(State("ready", moves=n))
        hub.publish(Progress(StageReport("weights", "now", done=n)))
    events = drain(outbox)
    assert [e.seq for e in events] == sorted({e.seq for e in events})
    assert isinstance(events[0].body, Gap)
    assert events[0].body.count == 500
    texts = [e.body.text for e in events if isinstance(e.body, Log)]
    assert texts == [str(n) for n in range(500, MAX_RECORDS + 500)]
    assert [e.body.moves for e in events if isinstance(e.body, State)] == list(range(50))
    assert [e.body.footprint for e in events if isinstance(e.body, Stats)] == [49]
    assert len([e for e in events if isinstance(e.body, Progress)]) == 1


def test_viewer_too_far_behind_in_states_is_told_to_come_again():
    hub, outbox = Hub(), Outbox()
    outbox.kinds = frozenset(["state"])
    hub.listen(outbox.put)
    for n in range(MAX_STATES + 1):
        hub.publish(State("ready", moves=n))
    with pytest.raises(TooFarBehindError) as behind:
        outbox.take()
    assert behind.value.code == 4409


def test_kinds_not_subscribed_are_not_queued():
    hub, outbox = Hub(), Outbox()
    hub.listen(outbox.put)
    hub.publish(log("a"))
    assert outbox.is_empty


@given(
    breaks=st.lists(st.integers(0, 40), max_size=6),
    kinds=st.lists(st.sampled_from("lsr"), min_size=40, max_size=40),
)
def test_reconnecting_at_any_points_loses_and_doubles_nothing(breaks, kinds):
    hub = Hub()
    bodies = {"l": lambda: log("x"), "s": lambda: State("ready"), "r": lambda: Request("1", "done")}
    seen: list[int] = []
    outbox = Outbox()
    outbox.kinds = frozenset(KINDS)
    hub.listen(outbox.put)
    for n, kind in enumerate(kinds):
        hub.publish(bodies[kind]())
        if n in breaks:
            hub.unlisten(outbox.put)  # what was queued is lost with the link
            outbox = Outbox()
            outbox.kinds = frozenset(KINDS)
            missed = hub.since(hub.epoch, seen[-1] if seen else 0, KINDS)
            assert missed is not None
            seen += [e.seq for e in missed]
            hub.listen(outbox.put)
    seen += [e.seq for e in drain(outbox) if isinstance(e, Event)]
    assert seen == list(range(1, 41))


def test_empty_snapshot_says_that_nothing_runs():
    snapshot = Hub().snapshot(KINDS)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.state.phase == "stopped"
