import asyncio
import socket

import pytest

from veloxquant.supervisor.framing import HEADER, pack
from veloxquant.supervisor.links import WorkerGoneError, WorkerLink, WorkerRefusedError
from veloxquant.supervisor.messages import (
    MAX_LIST,
    Beat,
    Command,
    Done,
    Error,
    Event,
    Hello,
    Launch,
    LaunchSpec,
    PoolCells,
    State,
    Stats,
    decode,
)

HELLO = Hello("worker", "w", 1)


class Far:
    """The worker's end, and what the supervisor's end told."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.messages: list = []
        self.ends: list = []
        launch = Launch(LaunchSpec("/m"), "token", 7, "/s")
        self.link = WorkerLink(ours, launch, self.messages.append, self.ends.append)
        self.sock = theirs

    async def open(self) -> None:
        self.run = asyncio.create_task(self.link.run())
        self.reader, self.writer = await asyncio.open_connection(sock=self.sock)

    async def next(self):
        (length,) = HEADER.unpack(await self.reader.readexactly(4))
        return decode(await self.reader.readexactly(length))[0]

    async def close(self) -> None:
        self.writer.close()
        self.link.close()
        await asyncio.wait_for(self.run, 5)


@pytest.fixture
async def far():
    made = Far()
    await made.open()
    yield made
    await made.close()


async def test_worker_is_greeted_launched_and_fed_beats(far):
    assert isinstance(await far.next(), Hello)
    launch = await far.next()
    assert (launch.spec.model, launch.token, launch.listen_fd) == ("/m", "token", 7)
    assert isinstance(await asyncio.wait_for(far.next(), 3), Beat)


async def test_commands_get_their_own_answers(far):
    for _ in range(2):
        await far.next()
    far.writer.write(pack(HELLO))
    first = asyncio.create_task(far.link.command("audit", {}, 5))
    second = asyncio.create_task(far.link.command("cancel", {"request": "9"}, 5))
    commands = [await far.next(), await far.next()]
    assert [c.op for c in commands if isinstance(c, Command)] == ["audit", "cancel"]
    far.writer.write(pack([Error(commands[1].id, "not_found", "no such"), Done("nobody")]))
    far.writer.write(pack(Done(commands[0].id, {"nbytes": 1})))
    assert await first == {"nbytes": 1}
    with pytest.raises(WorkerRefusedError, match="no such"):
        await second


async def test_silent_and_dead_worker_fail_the_command(far):
    with pytest.raises(WorkerGoneError, match=r"did not answer `audit` in 0\.05 s"):
        await far.link.command("audit", {}, 0.05)
    waiting = asyncio.create_task(far.link.command("audit", {}, 5))
    await asyncio.sleep(0)
    far.writer.close()
    with pytest.raises(WorkerGoneError, match="gone"):
        await waiting
    await far.run
    assert far.ends == [None]


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (pack(Beat(1.0)), "first message must be hello"),
        (pack(Hello("worker", "w", 1, major=9)), "speaks protocol 9"),
        (pack([HELLO, State("ready")]), "may not send State"),
        (pack([HELLO, Event("e", 1, 0.0, Stats())]), "may not send Event"),
        (pack([HELLO, Command("1", "shutdown")]), "may not send Command"),
        (pack(HELLO) + HEADER.pack(0xFFFFFFFF), "announced"),
        (pack(HELLO) + HEADER.pack(3) + b"{}}", "protocol"),
        (
            pack([HELLO, Stats(pool=PoolCells(16, 1, 1, cells=[(1, "#", 1)] * (MAX_LIST + 1)))]),
            "items, limit",
        ),
    ],
)
async def test_worker_that_breaks_the_protocol_is_named(far, frame, says):
    far.writer.write(frame)
    await asyncio.wait_for(far.run, 5)
    (why,) = far.ends
    assert why.code == "internal"
    assert says in why.detail


async def test_stream_that_ends_inside_a_frame_is_a_death_not_a_lie(far):
    for _ in range(2):  # unread data would turn the end into a reset
        await far.next()
    far.writer.write(pack(HELLO) + pack(Beat(1.0))[:-2])
    far.writer.close()
    await asyncio.wait_for(far.run, 5)
    assert far.ends == [None]
