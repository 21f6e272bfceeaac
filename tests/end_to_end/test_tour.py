"""The panel from start to stop, key by key: real supervisor, real worker, a model that can talk."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual import events

from veloxquant.panel import units
from veloxquant.panel.app import PanelApp
from veloxquant.panel.widgets.table import PickTable
from veloxquant.supervisor.client import ControlClient

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(400),
]

PASSAGE = (
    "The river begins high in the mountains, where snow melts in spring and small streams run down"
    " between the rocks. It is cold and clear there, and only a few fish live in it. Further down"
    " it flows through a narrow valley with dark trees on both sides, and in the summer people come"
    " to walk along its banks. An old wooden bridge crosses it near the first village. Below the"
    " village the valley becomes wide, the water is slow, and the fields beside it are green until"
    " late in the year. Farmers have lived here for a long time. They built small canals that carry"
    " the water to their gardens, and a mill that has not worked for many years but still stands by"
    " the river. When it rains in the mountains for many days, the river rises quickly and covers"
    " the lowest fields, so nobody has ever built a house there. In winter its edges freeze, and"
    " the sound of the water under the ice can be heard at night. After the last village it passes"
    " through a forest and then reaches the lake, where birds rest on their way to the south."
)
QUESTION = "What does this text tell us about the river?"
STAGES = ("worker process", "libraries", "weights", "cache method", "trial token", "listen")
WORDS = (
    "a about above across all along also an and are around as at be beautiful been below between by"
    " can clear cold down each fish flow flowing flows for from green has have high hills in into"
    " is it its land large life long many more most mountain mountains natural nature not of often"
    " on one or other over people place plants river rivers rocks rocky scene sea see small so some"
    " stream such sun that the their them there these they this through to trees up valley very"
    " view was water waters way when where which while wild wind winding with world you"
)
COMMON = frozenset(WORDS.split())


def is_english(text: str) -> bool:
    """At least 15 common words, most words known, nothing but printable ASCII and quotes."""
    words = re.findall(r"[a-z']+", text.lower())
    known = [word for word in words if word in COMMON]
    printable = (
        all(c.isprintable() or c == "\n" for c in text) and "\N{REPLACEMENT CHARACTER}" not in text
    )
    return printable and len(known) >= 15 and len(known) >= 0.4 * len(words)


def test_is_english_can_say_no() -> None:
    assert is_english(" ".join(sorted(COMMON)[:40]))
    assert not is_english("the of " * 5)
    assert not is_english("river " + "xq zzv wnk " * 20)
    assert not is_english("the river in the mountains is a place of water and life and fish \ufffd")


async def test_pick_start_watch_chat_and_stop(
    real: Any,
    demo: Path,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    until: Callable[..., Any],
    text_of: Callable[[Any], str],
    is_free: Callable[[int], bool],
) -> None:
    monkeypatch.setenv("VELOXQUANT_MODELS_FOLDERS", os.fspath(demo.parent))
    monkeypatch.setenv("VELOXQUANT_SERVER_PORT", str(free_port))
    monkeypatch.setenv("VELOXQUANT_SERVER_MAX_TOKENS", "48")
    assert real.start() == "ok"
    app = PanelApp()
    async with app.run_test(size=(110, 36)) as pilot, ControlClient() as client:
        await until(pilot, lambda: app.models and app.view.epoch, "models and supervisor")

        # pick the model, the method and its bits
        await pilot.press("p")
        await until(pilot, lambda: demo.name in text_of(app), "the list of models")
        await pilot.press("enter")
        await until(pilot, lambda: "MAX CTX" in text_of(app) and "kivi" in text_of(app), "Fit")
        table = app.screen.query_one(PickTable)
        await pilot.press("c", *"1024", "enter")
        await until(pilot, lambda: "at 1,024 tokens" in text_of(app), "the typed context")
        while table.key != "kivi":
            await pilot.press("down")
        await pilot.press("s", "4", "enter")
        await until(pilot, lambda: "settings bit_width_inlier=4" in text_of(app), "4 bits")

        # start, and watch the phases
        await pilot.press("enter")
        seen: set[str] = set()

        def is_ready() -> bool:
            lines = text_of(app).splitlines() if app.current_mode == "run" else []
            seen.update(s for s in STAGES for line in lines if "now" in line and s in line)
            assert app.view.fault is None, app.view.fault
            return app.view.is_serving

        await until(pilot, is_ready, "the server")
        assert {"libraries", "weights", "trial token"} <= seen
        await until(pilot, lambda: f"127.0.0.1:{free_port}/v1" in text_of(app), "its address")
        spec = app.view.spec
        assert spec is not None
        assert (spec.method, spec.options, spec.context) == ("kivi", {"bit_width_inlier": 4}, 1024)

        # chat; the gauges move, and the one of the cache tells what a walk over it finds
        await pilot.press("4")
        await until(pilot, lambda: "enter sends" in text_of(app), "the chat")
        app.screen.focused.post_message(events.Paste(f"{PASSAGE} "))
        await until(pilot, lambda: "way to the south." in text_of(app), "the pasted text")
        await pilot.press(*QUESTION, "enter")
        await until(pilot, lambda: app.desk and app.desk.turns[1:] and app.desk.turns[1].text, "it")
        await pilot.press("f3")
        await until(pilot, lambda: app.view.stats and app.view.stats.kv_claimed, "the gauge")
        before = app.view.stats.kv_claimed
        audit = await client.command("audit")
        await until(pilot, lambda: app.view.stats.kv_claimed >= audit["claimed"], "news")
        after = app.view.stats.kv_claimed
        assert app.chat_is_answering()
        assert audit["claimed"] == audit["walked"]
        slack = 0.05 * audit["claimed"] + (64 << 10)
        assert abs(audit["resident"] - audit["claimed"]) <= slack
        assert before <= audit["claimed"] <= after
        assert after <= 1.2 * audit["claimed"], "the gauge, a few tokens later"
        assert audit["walked"] < app.view.stats.kv_fp16 / 2, "and it is compressed"
        await until(
            pilot,
            lambda: (
                f"kv claimed {units.size(app.view.stats.kv_claimed)}" in text_of(app)
                and f"held {units.size(app.view.stats.kv_resident)}" in text_of(app)
            ),
            "the gauge on the screen",
        )
        await until(pilot, lambda: app.view.stats.decode_tps > 0, "the speed")

        # the answer
        await until(pilot, lambda: not app.chat_is_answering(), "the end of the answer")
        await pilot.press("f4")
        answer = app.desk.turns[1]
        assert answer.status == "done"
        assert is_english(answer.text), answer.text
        assert "river" in answer.text.lower()
        await until(pilot, lambda: answer.text.split()[-1] in text_of(app), "the answer, drawn")
        await until(pilot, lambda: app.view.stats.kv_claimed == 0, "the cache to be let go")

        # stop
        worker = app.view.server.pid
        assert worker in real.processes()
        await pilot.press("f3", "x")
        await until(pilot, lambda: "STOP THE SERVER" in text_of(app), "the question")
        await pilot.press("enter")
        await until(pilot, lambda: app.view.server.phase == "stopped", "the end")
        await until(pilot, lambda: "No server is running" in text_of(app), "the end, drawn")
        assert set(real.processes()) == {real.pid}
        assert is_free(free_port)
    assert real.end() == 0
    assert real.processes() == {}
    assert not list(real.home.glob("run/*.sock"))
