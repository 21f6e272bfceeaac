"""The panel with fakes, and a state folder of its own for each test."""

import sys
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
        app.fake_now = 0.0
        app.fake_control, app.fake_library = control, library
        return app

    return build
