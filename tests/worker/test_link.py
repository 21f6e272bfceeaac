import logging
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from veloxquant.supervisor.framing import recv_frame, send_frame
from veloxquant.supervisor.messages import (
    MAX_LOG_CHARS,
    Beat,
    Done,
    Gap,
    Log,
    Ready,
    Request,
    Stats,
)
from veloxquant.worker.link import Link, LinkHandler, Outbox

READY = Ready(1, "m", 1, "fp16", 1, 0, 0)


def drain(outbox: Outbox) -> list[Any]:
    out: list[Any] = []
    while batch := outbox.take(timeout=0):
        out += batch
    return out


def test_old_logs_go_first_then_gauges_and_the_rest_stays() -> None:
    outbox = Outbox(max_records=4)
    for message in (Log("info", "a", "old"), Stats(), READY, Log("info", "a", "new"), Done("1")):
        outbox.put(message)
    assert drain(outbox) == [Gap("log", 1), Stats(), READY, Log("info", "a", "new"), Done("1")]
    for message in (Stats(), READY, Stats(tokens=1), READY, READY, READY):
        outbox.put(message)
    assert drain(outbox) == [Gap("stats", 2), READY, READY, READY, READY]


def test_what_must_arrive_is_kept_even_beyond_the_bound() -> None:
    outbox = Outbox(max_records=2)
    kept = [Request(str(i), "done") for i in range(9)]
    for message in kept:
        outbox.put(message)
    assert drain(outbox) == kept


def test_bytes_are_bounded_too() -> None:
    outbox = Outbox(max_bytes=100_000)
    for i in range(100):
        outbox.put(Log("info", "a", "x" * 10_000, wall=i))
    left = drain(outbox)
    assert left[0] == Gap("log", 100 - len(left) + 1)
    assert len(left) < 8
    assert left[-1].wall == 99


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Link, queue.Queue[Any], threading.Event]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    got: queue.Queue[Any] = queue.Queue()
    ended = threading.Event()
    link = Link(theirs, got.put, ended.set)
    link.start()
    yield ours, link, got, ended
    ours.close()
    assert ended.wait(5)
    link.finish()
    theirs.close()


def test_both_directions_and_the_end(pair: Any) -> None:
    ours, link, got, ended = pair
    link.send(Beat(1.0))
    assert recv_frame(ours) == [Beat(1.0)]
    send_frame(ours, Beat(2.0))
    assert got.get(timeout=5) == Beat(2.0)
    assert not ended.is_set()


def test_a_reader_that_stops_blocks_nobody_and_loses_only_logs(pair: Any) -> None:
    ours, link, _, _ = pair
    for i in range(20_000):
        link.send(Log("info", "flood", f"{i:06} " + "x" * 200))
    link.send(READY)
    seen: list[Any] = []
    while not seen or seen[-1] != READY:
        seen += recv_frame(ours)
    gaps = sum(message.count for message in seen if isinstance(message, Gap))
    logs = sum(isinstance(message, Log) for message in seen)
    assert gaps + logs == 20_000
    assert gaps > 0


def test_garbage_ends_the_link(pair: Any) -> None:
    ours, _, _, ended = pair
    ours.sendall(b"\xff\xff\xff\xff")
    assert ended.wait(5)


def test_log_records_become_messages() -> None:
    sent: list[Any] = []
    logger = logging.Logger("veloxquant.worker.engine")
    logger.addHandler(LinkHandler(sent.append))
    logger.warning("%d of %d", 1, 2, extra={"request": "r1"})
    logger.error("x" * 50_000)
    logger.log(5, "fine")
    assert (sent[0].level, sent[0].source, sent[0].text) == ("warning", "engine", "1 of 2")
    assert sent[0].request == "r1"
    assert sent[1].level == "error"
    assert len(sent[1].text) <= MAX_LOG_CHARS
    assert sent[2].level == "debug"
