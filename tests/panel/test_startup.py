"""What starting costs and imports, and which terminals are refused."""

import subprocess
import sys

import pytest

from veloxquant.panel.__main__ import refusal

FIRST_PAINT = """
import asyncio, sys, time
started = time.perf_counter()
from veloxquant.panel.app import PanelApp

class Control:
    async def connect(self): await asyncio.sleep(60)
    async def close(self): pass

class Library:
    def memory(self): time.sleep(0.2); raise SystemExit

async def main():
    app, seen, begin = PanelApp(Control, Library), [], PanelApp._begin
    def painted(self):
        seen.append(sorted(m for m in FORBIDDEN if m in sys.modules))
        begin(self)
    PanelApp._begin = painted
    async with app.run_test(size=(80, 24)) as pilot:
        while not seen:
            await pilot.pause(0.01)
        print(f"{time.perf_counter() - started:.2f}", *seen)

FORBIDDEN = {"aiohttp", "huggingface_hub", "mlx", "mlx_lm", "transformers", "torch", "numpy",
             "veloxquant.planning", "veloxquant.planning.fit", "tomlkit", "psutil"}
asyncio.run(main())
"""

ALL_AREAS = """
import asyncio, sys
sys.path.insert(0, TESTS)
import panel_fakes as fakes
from veloxquant.panel.app import PanelApp
import veloxquant.panel.control
from veloxquant.panel.library import PlanningLibrary

async def main():
    control = fakes.FakeControl(*fakes.serving(5))
    app = PanelApp(lambda: control, PlanningLibrary)
    async with app.run_test(size=(100, 30)) as pilot:
        while app.checks is None or not app.view.epoch:
            await pilot.pause(0.02)
        for area in ("models", "fit", "run", "chat", "logs", "profile", "settings"):
            app.action_go(area)
            await pilot.pause()
    print([m for m in ("mlx", "mlx_lm", "transformers", "torch") if m in sys.modules])

asyncio.run(main())
"""


def run(script, **env):
    import os

    return subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=50,
        env=os.environ | env, check=False,
    )  # fmt: skip


def test_nothing_heavy_is_imported_before_the_first_paint():
    done = run(FIRST_PAINT)
    assert done.stdout.split(maxsplit=1)[1:] == ["[]\n"], done.stdout + done.stderr


@pytest.mark.bench
def test_first_paint_within_a_second():
    times = sorted(float(run(FIRST_PAINT).stdout.split()[0]) for _ in range(5))
    assert times[2] <= 1.0


def test_no_area_ever_loads_a_model_library(tmp_path):
    from pathlib import Path

    tests = str(Path(__file__).parent)
    done = run(ALL_AREAS.replace("TESTS", repr(tests)), VELOXQUANT_HOME=str(tmp_path / "h"))
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("env", "tty", "words"),
    [
        ({"TERM": "xterm"}, True, ""),
        ({"TERM": "dumb"}, True, "TERM=dumb"),
        ({}, True, "cannot draw"),
        ({"TERM": "xterm"}, False, "draws on a terminal"),
    ],
)
def test_terminals_that_cannot_draw_are_pointed_to_the_commands(env, tty, words):
    why = refusal(env, tty)
    assert words in why
    assert bool(why) == bool(words)
    if why:
        assert "vq status" in why


def test_started_without_a_terminal_it_leaves_with_a_sentence():
    done = subprocess.run(
        [sys.executable, "-P", "-m", "veloxquant.panel"], stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "vq up" in done.stderr


def test_every_theme_of_the_settings_is_one_of_the_panel():
    from textual.app import App

    from veloxquant.config.settings import SETTINGS
    from veloxquant.panel import theme

    app = App()
    app.register_theme(theme.VELOX)
    assert set(SETTINGS["look.theme"].choices) == {"auto", *app.available_themes}


def test_the_look_keeps_its_origin(monkeypatch):
    from veloxquant.config.settings import load_settings
    from veloxquant.panel import __main__, theme

    for name in ("_VELOXQUANT_THEME", "_VELOXQUANT_ASCII", "TEXTUAL_ANIMATIONS"):
        monkeypatch.setenv(name, "")
    for name in ("VELOXQUANT_LOOK_THEME", "VELOXQUANT_LOOK_ASCII"):
        monkeypatch.delenv(name, raising=False)
    __main__._apply_look()
    assert load_settings().origin("look.theme") == "default"
    assert load_settings().origin("look.ascii") == "default"
    monkeypatch.setenv("VELOXQUANT_LOOK_ASCII", "1")
    __main__._apply_look()
    assert theme.glyphs() is theme.PLAIN
