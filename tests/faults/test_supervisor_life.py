"""Real supervisors with the stub worker: start, stop, crash, attach."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

import pytest

from veloxquant.supervisor.client import CommandError, ControlClient, NotConnectedError
from veloxquant.supervisor.messages import Event, Snapshot, State, plain

pytestmark = [pytest.mark.fault, pytest.mark.timeout(60)]


async def until_state(
    client: ControlClient, is_so: Callable[[State], bool], seconds: float = 15.0
) -> State:
    """The first state from now on for which `is_so` holds."""
    state = State("stopped")
    async with asyncio.timeout(seconds), contextlib.aclosing(client.events()) as items:
        async for item in items:
            if isinstance(item, Snapshot):
                state = item.state
            elif isinstance(item, Event) and isinstance(item.body, State):
                state = item.body
            else:
                continue
            if is_so(state):
                break
    return state


async def until(client: ControlClient, phase: str) -> dict:
    """The state once it is in `phase`."""
    state = (await client.command("status"))["state"]
    return (
        state
        if state["phase"] == phase
        else plain(await until_state(client, lambda state: state.phase == phase))
    )


def can_bind(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen()
        except OSError:
            return False
        return True


async def test_start_and_stop_leave_no_process_and_a_free_port(supervisor):
    supervisor.stub(fork_child=True)
    await supervisor.open()
    async with ControlClient() as client:
        spec = supervisor.spec()
        answer = await client.command("start", {"spec": spec})
        assert answer["state"]["phase"] in ("starting", "loading", "ready")
        state = await until(client, "ready")
        assert not can_bind(spec["port"])
        token_file = supervisor.home / "state" / "token"
        assert token_file.stat().st_mode & 0o777 == 0o600
        assert (await client.command("audit"))["token"] == token_file.read_text()
        assert any("sleep" in command for command in supervisor.processes().values())
        started = time.monotonic()
        await client.command("stop", {"grace": 2.0})
        assert time.monotonic() - started < 1.0
        assert supervisor.processes() == {}
        assert can_bind(spec["port"])
        assert not token_file.exists()
        assert state["pid"] not in supervisor.processes()
        await client.command("shutdown")
        await asyncio.wait_for(supervisor.left.wait(), 5.0)


async def test_worker_that_ignores_sigterm_is_gone_within_grace_and_a_second(supervisor):
    supervisor.stub(ignore_term=True, fork_child=True)
    await supervisor.open()
    async with ControlClient() as client:
        await client.command("start", {"spec": supervisor.spec()})
        await until(client, "ready")
        started = time.monotonic()
        await client.command("stop", {"grace": 1.0})
        assert time.monotonic() - started <= 2.0
        assert supervisor.processes() == {}


async def test_stopped_process_can_be_stopped_and_is_shown_as_unresponsive(supervisor):
    await supervisor.open(silent=0.8, dead=30.0)
    async with ControlClient() as client:
        await client.command("start", {"spec": supervisor.spec()})
        pid = (await until(client, "ready"))["pid"]
        os.kill(pid, signal.SIGSTOP)
        await until_state(client, lambda state: state.unresponsive, 5.0)
        os.kill(pid, signal.SIGCONT)
        await until_state(client, lambda state: not state.unresponsive, 2.0)
        lines = (await client.command("logs", {"last": 100}))["lines"]
        assert any("most recent call first" in line["text"] for line in lines)
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        await client.command("stop", {"grace": 0.5})
        assert time.monotonic() - started <= 1.5


async def test_silent_worker_is_killed_in_the_end_and_started_again(supervisor):
    supervisor.stub(silent=True)
    await supervisor.open(silent=0.3, dead=0.8)
    async with ControlClient() as client:
        await client.command("start", {"spec": supervisor.spec()})
        await until_state(client, lambda state: state.restarts == 1)
        history = (await client.command("status"))["history"]
        assert history[0]["reason"]["code"] == "unresponsive"


async def test_crash_is_told_at_once_and_the_same_spec_comes_back(supervisor):
    await supervisor.open()
    async with ControlClient() as client:
        spec = supervisor.spec(options={"bit_width_inlier": 3})
        await client.command("start", {"spec": spec})
        pid = plain(await until_state(client, lambda state: state.phase == "ready"))["pid"]
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        crashed = await until_state(client, lambda state: state.phase == "crashed")
        assert time.monotonic() - killed < 0.5
        assert crashed.reason.code == "killed"
        await until(client, "ready")
        state = (await client.command("status"))["state"]
        assert state["pid"] != pid
        assert state["spec"]["options"] == {"bit_width_inlier": 3}
        assert state["restarts"] == 1


async def test_crash_loop_gives_up_after_five_restarts_and_stays_so(supervisor):
    supervisor.stub(crash_at_start=True)
    await supervisor.open()
    async with ControlClient() as client:
        await client.command("start", {"spec": supervisor.spec()})
        state = await until(client, "failed")
        assert state["reason"]["code"] == "crash_loop"
        assert state["restarts"] == 5
        assert "last words" in state["last_lines"]
        assert len((await client.command("status"))["history"]) == 6
        assert supervisor.processes() == {}
    await supervisor.close()
    await supervisor.open()
    async with ControlClient() as client:
        status = await client.command("status")
        assert status["state"]["phase"] == "failed"
        assert status["state"]["reason"]["code"] == "crash_loop"
        assert "last words" in status["state"]["last_lines"]
        assert status["barred"]
        supervisor.stub()
        await client.command("start", {"spec": supervisor.spec()})
        await until(client, "ready")


@pytest.mark.parametrize("code", ["bad_model", "does_not_fit", "unsupported"])
async def test_failure_that_cannot_heal_is_shown_and_nothing_runs(supervisor, code):
    supervisor.stub(fatal=code)
    await supervisor.open()
    async with ControlClient() as client:
        await client.command("start", {"spec": supervisor.spec()})
        state = await until(client, "failed")
        assert state["reason"]["code"] == code
        assert state["reason"]["detail"] == "as asked by the test"
        assert state["restarts"] == 0
        assert supervisor.processes() == {}


async def test_taken_port_and_missing_model_are_told_within_two_seconds(supervisor):
    await supervisor.open()
    async with ControlClient() as client:
        with socket.socket() as owner:
            owner.bind(("127.0.0.1", 0))
            owner.listen()
            port = owner.getsockname()[1]
            started = time.monotonic()
            with pytest.raises(CommandError) as taken:
                await client.command("start", {"spec": supervisor.spec(port)})
            assert time.monotonic() - started < 2.0
            assert taken.value.code == "port_taken"
            assert f"pid {os.getpid()}" in taken.value.message
            assert "next free one is" in taken.value.hint
            assert (await client.command("status"))["state"]["phase"] == "failed"
        for model in ("/no/such/folder", "nobody/nothing", str(supervisor.home)):
            started = time.monotonic()
            with pytest.raises(CommandError) as missing:
                await client.command("start", {"spec": supervisor.spec() | {"model": model}})
            assert time.monotonic() - started < 2.0
            assert missing.value.code == "model_missing"
        assert supervisor.processes() == {}
        await client.command("start", {"spec": supervisor.spec(port)})
        await until(client, "ready")


async def test_start_is_idempotent_and_stop_during_start_wins(supervisor):
    supervisor.stub(slow_load=20)
    await supervisor.open()
    async with ControlClient() as client:
        spec = supervisor.spec()
        first, second = await asyncio.gather(
            client.command("start", {"spec": spec}), client.command("start", {"spec": spec})
        )
        assert first["state"]["pid"] == second["state"]["pid"]
        await until(client, "loading")
        with pytest.raises(CommandError) as refused:
            await client.command("start", {"spec": spec | {"context": 99}})
        assert refused.value.code == "already_running"
        started = time.monotonic()
        answers = await asyncio.gather(*(client.command("stop") for _ in range(3)))
        assert time.monotonic() - started < 3.0
        assert {a["state"]["phase"] for a in answers} == {"stopped"}
        assert supervisor.processes() == {}


async def test_restart_runs_a_new_process_with_the_same_spec(supervisor):
    await supervisor.open()
    async with ControlClient() as client:
        with pytest.raises(CommandError, match="no server was started"):
            await client.command("restart")
        spec = supervisor.spec()
        await client.command("start", {"spec": spec})
        before = await until(client, "ready")
        await client.command("restart")
        after = await until(client, "ready")
        assert after["pid"] != before["pid"]
        assert after["port"] == spec["port"]


async def test_lying_frames_end_the_worker_not_the_supervisor(supervisor):
    supervisor.stub(lie_in_frames=True)
    await supervisor.open()
    async with ControlClient() as client:
        await client.command("start", {"spec": supervisor.spec()})
        state = await until(client, "failed")
        assert "broke the protocol" in state["reason"]["detail"]
        assert supervisor.processes() == {}


async def test_busy_while_requests_run(supervisor):
    supervisor.stub(running=2)
    await supervisor.open()
    async with ControlClient() as client:
        await client.command("start", {"spec": supervisor.spec()})
        await until(client, "busy")
        with pytest.raises(CommandError) as refused:
            await client.command("cancel", {"request": "none"})
        assert (refused.value.code, refused.value.hint) == ("not_found", "Look at the list.")


async def test_two_supervisors_at_once_one_serves_the_other_leaves(daemon):
    assert daemon.start() == "ok"
    pid = daemon.pid
    first = daemon._process
    assert daemon.start() == f"taken {pid}"
    assert daemon.wait(5.0) == 0
    daemon._process = first
    async with ControlClient() as client:
        assert client.hello.pid == pid


async def test_many_clients_at_once_start_one_supervisor(home):
    extra = ("--idle", "0.5")
    clients = [ControlClient(name=f"c{n}", extra=extra) for n in range(6)]
    try:
        hellos = await asyncio.gather(*(client.connect() for client in clients))
        assert len({(hello.pid, hello.epoch) for hello in hellos}) == 1
    finally:
        for client in clients:
            await client.close()


async def test_idle_supervisor_leaves_by_itself(daemon):
    daemon.start("--idle", "0.3")
    async with ControlClient() as client:
        await asyncio.sleep(0.6)
        assert (await client.command("status"))["state"]["phase"] == "stopped"
    assert daemon.wait(5.0) == 0
    with pytest.raises(NotConnectedError, match="no supervisor runs"):
        await ControlClient().connect(start=False)
