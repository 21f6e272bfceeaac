"""The control socket: hand-shake, several viewers, floods, slow and lost links."""

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from veloxquant.supervisor.client import (
    CommandError,
    ControlClient,
    LinkChange,
    NotConnectedError,
    run_command,
)
from veloxquant.supervisor.messages import (
    MAX_MESSAGE_BYTES,
    Accepted,
    Command,
    Done,
    Event,
    Gap,
    Hello,
    Log,
    Refuse,
    Snapshot,
    State,
    decode,
    encode,
)

pytestmark = [pytest.mark.fault, pytest.mark.timeout(60)]


@contextlib.asynccontextmanager
async def raw_link(supervisor, hello: Hello | None = None):
    """A WebSocket to the supervisor, without our client."""
    path = str(supervisor.controller.paths.socket)
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
        session.ws_connect("http://x/v1/control", max_msg_size=0) as ws,
    ):
        assert isinstance(decode((await ws.receive()).data)[0], Hello)
        if hello is not None:
            await ws.send_bytes(encode(hello))
        yield ws


def own(kind: str) -> int:
    """How many descriptors (`fd`) or threads (`task`) this process has."""
    return len(list(Path("/proc/self", kind).iterdir()))


async def log_texts(items):
    """Texts of the log lines that come."""
    async for item in items:
        if isinstance(item, Event) and isinstance(item.body, Log):
            yield item.body.text


async def test_socket_is_for_us_alone(supervisor):
    await supervisor.open()
    path = supervisor.controller.paths.socket
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_peer_of_another_user_is_refused(supervisor, monkeypatch):
    await supervisor.open()
    monkeypatch.setattr("veloxquant.supervisor.server.peer_uid", lambda sock: 12345)
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        async with raw_link(supervisor):
            pass
    assert refused.value.status == 403


async def test_viewer_that_says_nothing_is_closed_after_two_seconds(supervisor):
    await supervisor.open()
    async with raw_link(supervisor) as ws:
        started = time.monotonic()
        frame = await ws.receive()
        assert (frame.type, ws.close_code) == (aiohttp.WSMsgType.CLOSE, 4408)
        assert 1.5 < time.monotonic() - started < 4.0


async def test_other_major_is_refused_other_minor_is_served(supervisor):
    await supervisor.open()
    async with raw_link(supervisor, Hello("cli", "old", 1, major=99)) as ws:
        refuse = decode((await ws.receive()).data)[0]
        assert isinstance(refuse, Refuse)
        assert "vq shutdown" in refuse.hint
        await ws.receive()
        assert ws.close_code == 4400
    async with raw_link(supervisor, Hello("cli", "new", 1, minor=7)) as ws:
        await ws.send_str('{"type":"command","id":"1","op":"status","added_later":true}')
        assert decode((await ws.receive()).data) == [Accepted("1")]
        assert isinstance(decode((await ws.receive()).data)[0], Done)


@pytest.mark.parametrize(
    "data",
    [b"{", b"[" * 100_000, b'{"type":"beat","t":1}', b'{"type":"command","id":"1"}', b"\xff"],
)
async def test_malformed_frame_closes_that_viewer_and_no_other(supervisor, data):
    await supervisor.open()
    async with ControlClient() as other:
        async with raw_link(supervisor, Hello("cli", "bad", 1)) as ws:
            await ws.send_bytes(data)
            await ws.receive()
            assert ws.close_code == 4400
        assert (await other.command("status"))["state"]["phase"] == "stopped"


async def test_frame_over_the_cap_closes_that_viewer(supervisor):
    await supervisor.open()
    async with raw_link(supervisor, Hello("cli", "big", 1)) as ws:
        await ws.send_bytes(b"x" * (MAX_MESSAGE_BYTES + 1))
        await ws.receive()
        assert ws.close_code == 4413


async def test_repeated_id_gets_the_same_answer_and_happens_once(supervisor):
    await supervisor.open()
    async with raw_link(supervisor, Hello("cli", "again", 1)) as ws:
        command = Command("same", "start", {"spec": supervisor.spec()})
        await ws.send_bytes(encode([command, command]))
        answers = []
        while len(answers) < 4:
            answers += decode((await ws.receive()).data)
        done = [answer for answer in answers if isinstance(answer, Done)]
        assert len(done) == 2
        assert done[0] == done[1]
    assert len(supervisor.controller.journal.records) == 1


async def test_bad_arguments_are_named(supervisor):
    await supervisor.open()
    async with ControlClient() as client:
        with pytest.raises(CommandError, match=r"port") as refused:
            await client.command("start", {"spec": {"model": "/a", "port": "http"}})
        assert refused.value.code == "usage"
        with pytest.raises(CommandError, match="grace=-1"):
            await client.command("stop", {"grace": -1.0})
        with pytest.raises(CommandError, match="no server is ready"):
            await client.command("audit")


async def test_read_only_viewer_watches_but_commands_nothing(supervisor):
    await supervisor.open()
    async with ControlClient(read_only=True) as viewer:
        assert (await viewer.command("status"))["state"]["phase"] == "stopped"
        for op in ("start", "stop", "restart", "shutdown", "drain", "cancel"):
            with pytest.raises(CommandError) as refused:
                await viewer.command(op)
            assert refused.value.code == "read_only"


async def test_all_viewers_see_who_asked(supervisor):
    await supervisor.open()
    async with ControlClient(name="desk") as desk, ControlClient(name="other") as other:
        watching = other.events()
        assert isinstance(await anext(watching), Snapshot)
        await desk.command("start", {"spec": supervisor.spec()})
        async for item in watching:
            if isinstance(item, Event) and isinstance(item.body, State):
                assert item.body.asked_by == "desk"
                break


async def test_flood_of_the_worker_loses_nothing_in_silence(supervisor):
    lines = 60_000
    supervisor.stub(flood=lines, big_line=300_000)
    controller = await supervisor.open()
    seen = {"lines": 0, "missing": 0}
    finished = asyncio.Event()

    def count(event: Event, kind: str) -> None:
        if isinstance(event.body, Gap):
            seen["missing"] += event.body.count
        elif isinstance(event.body, Log) and event.body.source == "native":
            seen["lines"] += event.body.text.startswith("flood")
            if event.body.text == "after":
                finished.set()

    controller.hub.listen(count)
    async with ControlClient() as client:
        await client.command("start", {"spec": supervisor.spec()})
        slowest = 0.0
        while not finished.is_set():
            started = time.monotonic()
            await client.command("status")
            slowest = max(slowest, time.monotonic() - started)
            await asyncio.sleep(0.01)
        assert seen["lines"] + seen["missing"] >= lines
        assert seen["lines"] + seen["missing"] <= lines + 2  # the big line may be among the missing
        newest = (await client.command("logs", {"last": 5}))["lines"]
        assert max(len(line["text"]) for line in newest) <= 16 << 10
        assert slowest < 1.0


async def test_viewer_that_never_reads_is_cut_off_and_others_do_not_wait(supervisor, monkeypatch):
    monkeypatch.setattr("veloxquant.supervisor.server.SEND_SECONDS", 0.5)
    controller = await supervisor.open()
    async with raw_link(supervisor, Hello("panel", "stuck", 1)) as stuck, ControlClient() as good:
        await stuck.send_bytes(encode(Command("1", "subscribe")))
        stuck._response.connection.transport.pause_reading()
        watching = good.events()
        assert isinstance(await anext(watching), Snapshot)
        worst = 0.0
        deadline = time.monotonic() + 10.0
        while len(controller.hub._listeners) > 1 and time.monotonic() < deadline:
            for _ in range(100):
                controller.hub.publish(Log("info", "native", "x" * 5_000))
            controller.logs.say("info", f"mark {time.monotonic()}")
            async for text in log_texts(watching):
                if text.startswith("mark"):
                    worst = max(worst, time.monotonic() - float(text[5:]))
                    break
        assert len(controller.hub._listeners) == 1, "the stuck viewer was not cut off"
        assert worst < 0.5


async def test_reconnecting_viewer_loses_and_doubles_nothing(supervisor):
    controller = await supervisor.open()
    total = 400
    async with ControlClient(name="viewer") as client:
        texts: list[str] = []
        ups = 0

        async def cut_often() -> None:
            for n in range(total):
                controller.hub.publish(Log("info", "engine", str(n)))
                if n % 50 == 25:
                    client._ws._response.connection.transport.abort()
                await asyncio.sleep(0.002)

        cutting = asyncio.create_task(cut_often())
        async for item in client.events():
            if isinstance(item, Event) and isinstance(item.body, Log):
                texts.append(item.body.text)
            elif isinstance(item, Snapshot):
                texts += [e.body.text for e in item.logs if isinstance(e.body, Log)]
            elif isinstance(item, LinkChange):
                ups += item.up
            if texts and texts[-1] == str(total - 1):
                break
        await cutting
    assert texts == [str(n) for n in range(total)]
    assert ups >= 3


async def test_late_viewer_gets_stages_logs_and_gauges_of_the_past(supervisor):
    supervisor.stub(log_lines=30)
    await supervisor.open()
    async with ControlClient() as first:
        await first.command("start", {"spec": supervisor.spec()})
        async for text in log_texts(first.events()):
            if text == "record 29":
                break
        async with asyncio.timeout(5):
            while supervisor.controller.hub.history.latest is None:
                await anext(first.events())
    async with ControlClient() as late:
        snapshot = await anext(late.events())
        assert isinstance(snapshot, Snapshot)
        assert [s.state for s in snapshot.state.stages] == ["done"] * 6
        assert snapshot.stats is not None
        assert snapshot.history
        assert "record 29" in [e.body.text for e in snapshot.logs if isinstance(e.body, Log)]


async def test_supervisor_that_ends_and_comes_back_is_seen_with_a_snapshot(supervisor):
    await supervisor.open()
    async with ControlClient() as client:
        items = client.events()
        first = await anext(items)
        await supervisor.close()
        down = await anext(items)
        while not isinstance(down, LinkChange):
            down = await anext(items)
        assert not down.up
        with pytest.raises(ConnectionError):
            await client.command("status")
        await supervisor.open()
        async for item in items:
            if isinstance(item, Snapshot):
                assert item.epoch != first.epoch
                break


@pytest.mark.timeout(90)
async def test_cycles_of_start_and_stop_leave_descriptors_and_threads_as_they_were(supervisor):
    await supervisor.open()
    async with ControlClient() as client:
        spec = supervisor.spec()
        counts, before = [], own("task")
        for n in range(25):
            await client.command("start", {"spec": spec})
            await client.command("stop", {"grace": 0.0})
            if n in (9, 24):
                counts.append(own("fd"))
                assert own("task") <= before + 8  # the loop's own pool of threads is bounded
        assert abs(counts[1] - counts[0]) <= 4  # files that are open for a moment


async def test_socket_that_was_cleaned_away_is_made_again(supervisor):
    controller = await supervisor.open()
    controller.paths.socket.unlink()
    await supervisor._server.heal()
    async with ControlClient() as client:
        assert client.is_connected


async def test_run_folder_that_others_can_write_is_refused_by_name(home):
    (home / "run").mkdir(parents=True)
    (home / "run").chmod(0o777)
    with pytest.raises(NotConnectedError, match="written by others"):
        await ControlClient().connect()


def test_command_without_an_event_loop(daemon):
    with pytest.raises(NotConnectedError, match="no supervisor runs"):
        run_command("status", start=False)
    daemon.start()
    assert run_command("status", start=False)["state"]["phase"] == "stopped"


def test_supervisor_and_client_load_no_model_library_and_no_screen():
    code = (
        "import sys, veloxquant.supervisor.client\n"
        "assert 'aiohttp' not in sys.modules\n"
        "import veloxquant.supervisor.__main__, veloxquant.supervisor.server\n"
        "banned = {'mlx', 'mlx_lm', 'transformers', 'torch', 'textual', 'numpy'}\n"
        "found = banned & set(sys.modules)\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=30)
