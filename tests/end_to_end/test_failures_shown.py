"""What a user sees in the panel when a start cannot work; supervisor and worker are real."""

import asyncio
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_model import make_tiny_model

from veloxquant.panel.app import PanelApp

pytestmark = [pytest.mark.timeout(300)]

SHOWN_WITHIN_S = 2.0
# other programs may have the processors
SLACK = 3.0


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers that loads and answers, with nonsense."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "Tiny-2L")


@pytest.fixture
def setting(
    real: Any, tiny_source: Path, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """A folder with one model, and a port, both as the panel's settings name them."""
    folder = tmp_path / "models" / "Tiny-2L"
    shutil.copytree(tiny_source, folder)
    monkeypatch.setenv("VELOXQUANT_MODELS_FOLDERS", str(folder.parent))
    monkeypatch.setenv("VELOXQUANT_SERVER_PORT", str(free_port))
    monkeypatch.setenv("VELOXQUANT_SERVER_CONTEXT", "128")
    assert real.start() == "ok"
    return SimpleNamespace(real=real, folder=folder, port=free_port)


@asynccontextmanager
async def panel(until: Callable[..., Any]) -> AsyncIterator[tuple[Any, Any]]:
    """The panel in its list of models, with the cursor on the only one."""
    app = PanelApp()
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: app.models and app.view.epoch, "models and supervisor")
        await pilot.press("p")
        await until(pilot, lambda: app.current_mode == "models", "the list of models")
        await pilot.pause()
        yield app, pilot


def workers(real: Any) -> dict[int, str]:
    """Processes of this home besides the supervisor."""
    return {pid: command for pid, command in real.processes().items() if pid != real.pid}


async def test_a_folder_that_is_gone(
    setting: SimpleNamespace, until: Callable[..., Any], text_of: Callable[[Any], str]
) -> None:
    async with panel(until) as (app, pilot):
        shutil.rmtree(setting.folder)
        asked = time.monotonic()
        await pilot.press("S")
        await until(pilot, lambda: "there is no folder" in text_of(app), "the reason")
        assert time.monotonic() - asked <= SLACK * SHOWN_WITHIN_S
        await until(pilot, lambda: "pick another model" in text_of(app), "a next step")
        assert "fetch the small demo model" in text_of(app)
        assert workers(setting.real) == {}
        await pilot.press("m")
        await until(pilot, lambda: app.current_mode == "models", "the next step")


async def test_weights_that_were_cut_off(
    setting: SimpleNamespace, until: Callable[..., Any], text_of: Callable[[Any], str]
) -> None:
    async with panel(until) as (app, pilot):
        weights = setting.folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        await pilot.press("S")
        await until(pilot, lambda: app.view.fault is not None, "the failure")
        since = app.view.server.since
        await until(pilot, lambda: "pick another model" in text_of(app), "a next step")
        assert time.monotonic() - since <= SLACK * SHOWN_WITHIN_S
        shown = text_of(app)
        assert app.view.fault.code == "bad_model"
        assert "model.safetensors" in shown
        assert "Traceback" not in shown
        assert workers(setting.real) == {}


async def test_a_taken_port_and_the_next_free_one(
    setting: SimpleNamespace, until: Callable[..., Any], text_of: Callable[[Any], str]
) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", setting.port))
        taken.listen()
        async with panel(until) as (app, pilot):
            asked = time.monotonic()
            await pilot.press("S")
            await until(pilot, lambda: "port is in use" in text_of(app), "the reason")
            assert time.monotonic() - asked <= SLACK * SHOWN_WITHIN_S
            assert f"127.0.0.1:{setting.port}" in text_of(app)
            assert "next free port" in text_of(app)
            assert workers(setting.real) == {}
            await pilot.press("n")
            await until(pilot, lambda: app.view.is_serving, "the server on another port")
            assert app.view.server.port > setting.port
            await pilot.press("x", "enter")
            await until(pilot, lambda: app.view.server.phase == "stopped", "the end")
    await asyncio.sleep(0)
    assert workers(setting.real) == {}
