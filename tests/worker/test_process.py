import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from fake_supervisor import FakeSupervisor

from veloxquant.supervisor.failures import FAILURES
from veloxquant.supervisor.messages import (
    Beat,
    Done,
    Error,
    Fatal,
    Hello,
    LaunchSpec,
    Profile,
    Progress,
    Ready,
    Request,
    Stats,
)

Start = Callable[..., FakeSupervisor]


@pytest.fixture(scope="module")
def worker(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeSupervisor]:
    """One worker for the tests that leave it as it was."""
    home = tmp_path_factory.mktemp("home")
    spec = LaunchSpec(str(tiny), "turboquant_rvq", context=1024, batch=4, api_key=True)
    found = FakeSupervisor(spec, home, token="the-key")
    found.expect(Ready)
    yield found
    found.close()


@pytest.fixture
def start(tiny: Path, tmp_path: Path) -> Iterator[Start]:
    found: list[FakeSupervisor] = []

    def make(model: str | Path = tiny, token: str = "", **fields: Any) -> FakeSupervisor:
        spec = LaunchSpec(str(model), **{"method": "fp16", "context": 512, **fields})
        found.append(FakeSupervisor(spec, tmp_path, token=token))
        return found[-1]

    yield make
    for one in found:
        one.close()


def test_openai_s_own_client_is_served(worker: FakeSupervisor) -> None:
    client = openai.OpenAI(base_url=f"{worker.url}/v1", api_key="the-key", max_retries=0)
    with client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        messages: Any = [{"role": "user", "content": "The river"}]
        whole = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, temperature=0, logprobs=True,
            top_logprobs=2,
        )  # fmt: skip
        stream = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert whole.choices[0].logprobs
        assert len(whole.choices[0].logprobs.content or ()) == 12
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="context"):
            client.completions.create(model="tiny", prompt=[5] * 2000)
    stranger = openai.OpenAI(base_url=f"{worker.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_the_supervisor_hears_everything_it_needs(worker: FakeSupervisor) -> None:
    worker.ask("audit")
    audit = worker.expect(Done).result
    assert {"claimed", "walked", "resident", "weights", "mlx_active"} <= set(audit)
    stats = worker.expect(Stats)
    assert stats.weights == audit["weights"] > 0
    assert stats.footprint > stats.mlx_active > 0
    assert stats.pool is not None
    worker.expect(Beat)
    assert len(worker.expect(Profile).layers) == 2
    worker.ask("cancel", request="nobody")
    assert worker.expect(Done).result == {}
    worker.ask("cancel")
    assert worker.expect(Error).code == "bad_arguments"
    first = [m for m in worker.received if not isinstance(m, (Beat, Stats, Profile))]
    assert isinstance(first[0], Hello)
    done = [m.report.stage for m in first if isinstance(m, Progress) and m.report.state == "done"]
    assert done == ["process", "imports", "weights", "cache", "canary", "listen"]
    ready = next(m for m in first if isinstance(m, Ready))
    assert (ready.layers, ready.compressed_layers, ready.port) == (2, 2, worker.port)


async def test_sigterm_lets_the_answer_finish_and_leaves_with_0(start: Start) -> None:
    worker = start()
    worker.expect(Ready)
    body = {"prompt": "The river", "max_tokens": 300, "temperature": 0, "stream": True}
    async with (
        aiohttp.ClientSession(worker.url) as session,
        session.post("/v1/completions", json=body) as answer,
    ):
        await answer.content.readuntil(b"\n\n")
        worker.process.terminate()
        text = (await answer.content.read()).decode()
    assert text.endswith("data: [DONE]\n\n")
    assert worker.wait() == 0
    assert [m for m in worker.received if isinstance(m, Request)][-1].state == "done"


async def test_drain_without_grace_cuts_with_a_last_word(start: Start) -> None:
    worker = start()
    worker.expect(Ready)
    body = {"prompt": "The river", "max_tokens": 500, "ignore": 1, "stream": True}
    async with (
        aiohttp.ClientSession(worker.url) as session,
        session.post("/v1/completions", json=body) as answer,
    ):
        await answer.content.readuntil(b"\n\n")
        worker.ask("drain", grace=0)
        began = time.monotonic()
        text = (await answer.content.read()).decode()
    assert "event: error" in text
    assert "stopping" in text
    assert worker.wait() == 0
    assert time.monotonic() - began < 3


def break_weights(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("model_missing", {"model": "/no/such/model"}),
        ("bad_model", {"model": "broken"}),
        ("usage", {"method": "no_such_method"}),
        ("usage", {"method": "kivi", "options": {"no_such_option": 1}}),
        ("usage", {"host": "0.0.0.0"}),
        ("usage", {"api_key": True}),
        ("usage", {"context": 1}),
    ],
)
def test_a_launch_that_cannot_work_says_why_at_once(
    code: str, fields: dict[str, Any], start: Start, tiny: Path, tmp_path: Path
) -> None:
    if fields.get("model") == "broken":
        shutil.copytree(tiny, tmp_path / "broken")
        break_weights(tmp_path / "broken")
        fields = {"model": tmp_path / "broken"}
    worker = start(**fields)
    hello = worker.expect(Hello)
    fatal = worker.expect(Fatal)
    assert time.time() - hello.wall < 4
    assert fatal.fault.code == code
    assert fatal.fault.detail
    assert worker.wait(5) == FAILURES[code].exit_code
    assert worker.process.stderr
    assert b"Traceback" not in worker.process.stderr.read()


def test_the_end_of_the_link_is_the_end(start: Start) -> None:
    worker = start()
    worker.expect(Hello)
    worker.hang_up()
    assert worker.wait(5) == FAILURES["orphaned"].exit_code


def test_another_parent_than_named_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "veloxquant.worker", "--parent", "1", "--link", "0"]
    assert subprocess.run(command, cwd=tmp_path, timeout=20).returncode == 75


PARENT = """
import os, socket, subprocess, sys
ours, theirs = socket.socketpair()
child = subprocess.Popen(
    [sys.executable, "-P", "-m", "veloxquant.worker",
     "--parent", str(os.getpid()), "--link", str(theirs.fileno())],
    pass_fds=(theirs.fileno(),), start_new_session=True)
theirs.close()
ours.recv(1)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches the process as Linux can")
def test_a_worker_dies_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert parent.stdout
    assert parent.stdin
    with parent.stdout, parent.stdin:
        # a handle that becomes readable at its death, whoever buries it
        child = os.pidfd_open(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(5)
        died, _, _ = select.select([child], [], [], 1.0)
        os.close(child)
    assert died
