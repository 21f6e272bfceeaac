"""Everything real: supervisor, worker, panel, and the demo model with its 135 million parameters.

The panel in a pty as users start it; with `Pilot` where a test looks inside.
"""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from terminal import PATIENCE_S, Terminal

from veloxquant.integration.demo_model import demo_folder, is_complete

REAL_WORKER = ("--worker-module", "veloxquant.worker")
# asked before any test sets a home of its own
_DEMO = demo_folder()


@pytest.fixture(scope="session")
def demo() -> Path:
    """The demo model's folder."""
    if not is_complete(_DEMO):
        pytest.skip("the demo model is not here: make demo-model")
    return _DEMO


def a_free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def can_listen(port: int) -> bool:
    """Whether a port is free."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen()
        except OSError:
            return False
        return True


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on now."""
    return a_free_port()


@pytest.fixture
def is_free() -> Callable[[int], bool]:
    """Tells whether a port is free."""
    return can_listen


@pytest.fixture(scope="module")
def server(
    demo: Path, tmp_path_factory: pytest.TempPathFactory, living: Callable[[Path], dict[int, str]]
) -> Iterator[SimpleNamespace]:
    """A server that is ready, with 4-bit kivi, for a whole module; nothing of it is left after."""
    from veloxquant.supervisor.client import run_command

    home, port = tmp_path_factory.mktemp("served"), a_free_port()
    spec = {
        "model": str(demo), "name": demo.name, "port": port, "max_tokens": 40, "batch": 4,
        "method": "kivi", "options": {"bit_width_inlier": 4},
        "context": 192,  # too short for the recall check, which takes seconds
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VELOXQUANT_HOME", str(home))
        run_command("start", {"spec": spec})
        end = time.monotonic() + PATIENCE_S
        while (state := run_command("status")["state"])["phase"] != "ready":
            assert state["phase"] in ("starting", "loading"), state
            assert time.monotonic() < end
            time.sleep(0.2)
        yield SimpleNamespace(home=home, port=port, url=f"http://127.0.0.1:{port}/v1")
        run_command("shutdown")
    end = time.monotonic() + 15
    while living(home):
        assert time.monotonic() < end, living(home)
        time.sleep(0.02)
    assert can_listen(port)
    assert not list(home.glob("run/*.sock"))


@pytest.fixture
def open_panel() -> Iterator[Callable[..., Terminal]]:
    """Opens panels in a pty; all are ended after the test."""
    found: list[Terminal] = []

    def make(**how: Any) -> Terminal:
        found.append(Terminal.panel(**how))
        return found[-1]

    yield make
    for one in found:
        one.close()


@pytest.fixture
def until() -> Callable[..., Any]:
    """Waits for a condition while a Pilot's app runs; fails with what was waited for."""

    async def wait(
        pilot: Any, is_so: Callable[[], Any], what: str, seconds: float = PATIENCE_S
    ) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}:\n{read(pilot.app)}"
            await pilot.pause()
            await asyncio.sleep(0.02)

    return wait


def read(app: Any) -> str:
    """What the screen in front shows."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


@pytest.fixture
def text_of() -> Callable[[Any], str]:
    """Reads an app's screen."""
    return read


@pytest.fixture
def real(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A supervisor of our own, in the foreground, that starts the real worker."""
    monkeypatch.setenv("TEXTUAL_ANIMATIONS", "none")
    monkeypatch.setenv("VELOXQUANT_CHAT_TEMPERATURE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", os.fspath(daemon.home / "no-hub"))
    start = daemon.start
    daemon.start = lambda *args: start(*REAL_WORKER, *args)
    return daemon
