"""The panel with fakes, and a state folder of its own for each test."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Nothing of the user's own folders is read or written."""
    folder = tmp_path / "home"
    monkeypatch.setenv("VELOXQUANT_HOME", str(folder))
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TEXTUAL_ANIMATIONS", "none")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return folder


@pytest.fixture
def make_app():
    """Build an app around a fake control and library; both are attributes of it."""
    from panel_fakes import FakeControl, FakeLibrary, snapshot

    from veloxquant.panel.app import PanelApp

    def build(*messages, models=None, control=None, library=None):
        control = control or FakeControl(*(messages or (snapshot(),)))
        library = library or FakeLibrary(models)
        app = PanelApp(lambda: control, lambda: library, clock=lambda: app.fake_now)
        app.fake_now = 3.0
        app.fake_control, app.fake_library = control, library
        return app

    return build


@pytest.fixture
def until():
    """Wait for a condition while the app runs; fails with what was waited for."""

    async def wait(pilot, condition, what="", seconds=20.0):
        deadline = time.monotonic() + seconds
        while True:
            await pilot.pause()
            if condition():
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds} s for {what or condition}")
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def settled(until):
    """Wait until the snapshot and the first look have arrived."""

    async def wait(pilot):
        app = pilot.app
        await until(pilot, lambda: app.view.epoch and app.checks is not None, "the first look")
        return app

    return wait


@pytest.fixture
def text_of():
    """What the screen in front shows, as text."""

    def read(app) -> str:
        strips = app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip) for strip in strips)

    return read
