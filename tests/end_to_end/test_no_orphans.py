"""SIGKILL of the supervisor with the real worker at work: nothing it started may live on."""

import json
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from veloxquant.supervisor.client import ControlClient

pytestmark = [
    pytest.mark.model,
    pytest.mark.fault,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="needs the death signal of Linux"),
]

LIMIT_SECONDS = 1.0
SPEC = {"method": "kivi", "options": {"bit_width_inlier": 4}, "context": 192}


async def reach(client: ControlClient, moment: str) -> None:
    """Follow the start until a stage is under way, or the server is ready."""
    async for item in client.events():
        body = getattr(item, "body", None)
        state = getattr(item, "state", body)
        phase = getattr(state, "phase", "")
        assert phase != "failed", state
        if moment in {phase, getattr(getattr(body, "report", None), "stage", "")}:
            return


@pytest.mark.parametrize("moment", ["imports", "weights", "canary", "ready"])
async def test_a_killed_supervisor_takes_the_worker_with_it(
    real: Any, demo: Path, moment: str
) -> None:
    assert real.start() == "ok"
    spec = real.spec(**SPEC) | {"model": str(demo)}
    async with ControlClient() as client:
        await client.command("start", {"spec": spec})
        await reach(client, moment)
        if moment == "ready":
            begin_an_answer(spec["port"])
        assert len(real.processes()) >= 2
        real.kill()
        lived = real.gone_within(LIMIT_SECONDS)
    assert lived is not None, f"orphans: {real.processes()}"


def begin_an_answer(port: int) -> None:
    """Ask for a long answer; returns when its first words are there."""
    body = {"prompt": "The river", "max_tokens": 120, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    begun = threading.Event()

    def read() -> None:
        with urllib.request.urlopen(request, timeout=100) as answer:
            answer.readline()
            begun.set()

    threading.Thread(target=read, daemon=True).start()
    assert begun.wait(100)
