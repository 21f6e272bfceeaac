"""SIGKILL of the supervisor: nothing it started may live on."""

import asyncio
import json
import random
import subprocess
import sys

import psutil
import pytest

from veloxquant.supervisor.client import ControlClient

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(sys.platform != "linux", reason="needs the death signal of Linux"),
]

WAYS = ({}, {"python_busy": True}, {"fork_child": True}, {"hold_gil": True}, {"slow_load": 5})
LIMIT_SECONDS = 1.0


async def kill_once(daemon, flags: dict, moment: float) -> float:
    """Start server, kill the supervisor, and return how long its processes lived on."""
    daemon.stub(**flags)
    daemon.start()
    client = ControlClient()
    await client.connect(start=False)
    started = await client.command("start", {"spec": daemon.spec()})
    waits_for = "loading" if "slow_load" in flags else "ready"
    state = started["state"]
    # A third of the kills comes before the worker can have armed anything.
    while moment > 0.3 and state["phase"] != waits_for:
        state = (await client.command("status"))["state"]
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.1 * (moment - 0.3) if moment > 0.3 else 0.0)
    assert len(daemon.processes()) >= 3  # supervisor, guard, worker
    daemon.kill()
    lived = daemon.gone_within(LIMIT_SECONDS)
    await client.close()
    assert lived is not None, f"orphans after {flags}: {daemon.processes()}"
    return lived


def sleeper(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env={}, process_group=0, cwd="/")


async def kill_often(daemon, times: int) -> list[float]:
    rng = random.Random(7)
    return [await kill_once(daemon, WAYS[n % len(WAYS)], rng.random()) for n in range(times)]


@pytest.mark.timeout(60)
async def test_ten_killed_supervisors_leave_no_orphan(daemon):
    lived = await kill_often(daemon, 10)
    assert max(lived) <= LIMIT_SECONDS


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_fifty_killed_supervisors_leave_no_orphan(daemon):
    lived = sorted(await kill_often(daemon, 50))
    print(f"lived on: median {lived[25] * 1000:.0f} ms, most {lived[-1] * 1000:.0f} ms")
    assert lived[-1] <= LIMIT_SECONDS


async def test_next_supervisor_clears_a_worker_that_was_left_behind_and_spares_strangers(daemon):
    """Neither guard nor dead-man: a left-over is recognised by id, start time and command."""
    daemon.start()
    async with ControlClient() as client:
        await client.command("start", {"spec": daemon.spec()})
    daemon.kill()
    assert daemon.gone_within(LIMIT_SECONDS) is not None
    path = daemon.home / "state" / "journal.json"
    journal = json.loads(path.read_text())
    record = journal["records"][-1]
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    left_over, stranger = sleeper(command), sleeper(command)
    try:
        mine = {
            "pid": left_over.pid,
            "group": left_over.pid,
            "pid_start": psutil.Process(left_over.pid).create_time(),
            "command": psutil.Process(left_over.pid).cmdline(),
        }
        reused = {"pid": stranger.pid, "group": stranger.pid, "pid_start": 1.0}
        journal["records"] = [record | reused | {"command": command}, record | mine]
        path.write_text(json.dumps(journal))
        daemon.start()
        assert left_over.wait(5.0) == -9
        assert stranger.poll() is None
        async with ControlClient() as client:
            status = await client.command("status")
        assert status["history"][-1]["outcome"] == "lost"
        assert any("was still there" in w for w in status["state"]["warnings"])
    finally:
        for process in (left_over, stranger):
            process.kill()
            process.wait()


async def test_stale_socket_and_damaged_journal_are_healed(daemon):
    daemon.start()
    daemon.kill()
    assert (daemon.home / "run" / "control.sock").exists()
    (daemon.home / "state" / "journal.json").write_bytes(b'{"records": [{"lau')
    assert daemon.start() == "ok"
    async with ControlClient() as client:
        lines = (await client.command("logs"))["lines"]
    assert any("journal could not be read" in line["text"] for line in lines)
    assert (daemon.home / "state" / "journal.json.corrupt-1").exists()
