"""The commands against a real supervisor process with the stub worker."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veloxquant.cli import exit_codes

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_the_life_of_a_server(run: Run, demo: Path, daemon: Any, port: str) -> None:
    daemon.stub(log_lines=3)
    assert daemon.start().startswith("ok")
    code, out, err = run("up", "Tiny-1B", "--method", "kivi", "--port", port)
    assert (code, out) == (0, f"http://127.0.0.1:{port}/v1\n"), err
    assert "done" in err
    assert run("up", "Tiny-1B", "--method", "kivi", "--port", port)[0] == 0  # it is that one
    code, _, err = run("up", "Tiny-1B", "--method", "snapkv", "--port", port)
    assert (code, "already" in err) == (exit_codes.BUSY, True)
    assert run("status")[1].startswith("ready: Tiny-1B / kivi")
    assert json.loads(run("status", "--json")[1])["data"]["phase"] == "ready"
    lines = [json.loads(row) for row in run("logs", "--json", "--last", "50")[1].splitlines()]
    assert {"seq", "wall", "level", "source", "text"} <= set(lines[0])
    assert run("restart")[1] == f"http://127.0.0.1:{port}/v1\n"
    assert run("stop")[1].startswith("stopped:")
    assert run("chat", "-p", "x")[0] == exit_codes.NOT_FOUND
    assert run("shutdown")[:2] == (0, "stopped: server and supervisor\n")
    assert Path(f"/proc/{daemon.pid}/stat").read_text().split()[2] == "Z", "only not reaped yet"
    assert daemon.wait() == 0
    assert run("status")[1] == "stopped: no server is running\n"


@pytest.mark.parametrize(
    ("fatal", "code"),
    [("bad_model", 1), ("does_not_fit", 4)],
)
def test_a_worker_that_gives_up(
    run: Run, demo: Path, daemon: Any, port: str, fatal: str, code: int
) -> None:
    daemon.stub(fatal=fatal)
    daemon.start()
    status, out, err = run("up", "Tiny-1B", "--port", port)
    assert (status, out) == (code, "")
    assert err.splitlines()[-2].startswith("error: ")
    assert run("status")[1].startswith("failed:")


def test_a_taken_port(run: Run, demo: Path, daemon: Any) -> None:
    daemon.start()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, out, err = run("up", "Tiny-1B", "--port", str(taken.getsockname()[1]))
    assert (code, out) == (exit_codes.BUSY, "")
    assert "port" in err


def test_control_c_while_starting_stops_the_server(
    run: Run, demo: Path, daemon: Any, port: str
) -> None:
    daemon.stub(never_ready=True)
    daemon.start()
    words = [sys.executable, "-P", "-m", "veloxquant", "up", "Tiny-1B", "--port", port]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that a shell runs in the background inherit that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "imports" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (exit_codes.INTERRUPTED, ""), err
    assert run("status")[1].startswith("stopped:")
