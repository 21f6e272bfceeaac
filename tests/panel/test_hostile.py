"""Foreign text through every place that draws it: the app lives, the terminal sees no control."""

import msgspec
import panel_fakes as fakes
import pytest
from test_text import HOSTILE

from veloxquant.panel import transcript
from veloxquant.panel.ports import ModelItem
from veloxquant.supervisor.messages import (
    Fault,
    LayerRow,
    Log,
    Profile,
    Request,
    StageReport,
    State,
)

NASTY = "".join(HOSTILE).replace("\ud800", "") + "漢字" * 10 + "[/]" + "x" * 300


def harmless(shown: str) -> bool:
    return not any((ord(c) < 0x20 and c != "\n") or 0x7F <= ord(c) < 0xA0 for c in shown)


@pytest.mark.parametrize("size", [(60, 18), (120, 36)], ids=["60x18", "120x36"])
async def test_hostile_text_everywhere(size, make_app, settled, until, text_of, home):
    spec = msgspec.structs.replace(fakes.SPEC, model=f"/models/{NASTY}", method=NASTY)
    ready = msgspec.structs.replace(fakes.READY, spec=spec, warnings=[NASTY])
    folder = home / "state" / "chats"
    with transcript.Writer(transcript.create(folder)) as out:
        out.write(kind="user", text=NASTY)
        out.write(kind="answer", model=NASTY)
        out.write(kind="think", text=NASTY)
        out.write(kind="delta", text=NASTY)
        out.write(kind="fault", message=NASTY, hint=NASTY)
    model = ModelItem(name=NASTY, path=f"/m/{NASTY}", quant=NASTY, fits_note=NASTY, why_not=NASTY,
                      runnable=False, facts=((NASTY[:5], NASTY),))  # fmt: skip
    app = make_app(fakes.snapshot(ready, stats=fakes.stats()), models=[model, fakes.QWEN])
    (home / "state").chmod(0o700)
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        app.fake_control.send(
            Log(level="error", source=NASTY, text=NASTY, request=NASTY),
            Log(level=NASTY, source="x", text="odd level"),  # type: ignore[arg-type]
            Request(NASTY, "failed", detail=NASTY),
            Profile([LayerRow(0, NASTY, NASTY, 100, 50)]),
        )
        await until(pilot, lambda: app.view.profile is not None)
        for key in "1357":
            await pilot.press("escape", key)
            await pilot.pause()
            assert harmless(text_of(app)), key
        await pilot.press("4")
        await until(pilot, lambda: "␛" in text_of(app), "the transcript")
        assert harmless(text_of(app))
        await pilot.press("escape", "6")
        await until(pilot, lambda: "LAYER" in text_of(app))
        assert harmless(text_of(app))
        stages = [StageReport("weights", "failed", NASTY)]
        app.fake_control.send(State(phase="loading", spec=spec, stages=stages))
        await pilot.press("3")
        await until(pilot, lambda: "worker process" in text_of(app))
        assert harmless(text_of(app))
        fault = Fault("bad_model", NASTY, NASTY, NASTY)
        app.fake_control.send(State(phase="failed", spec=spec, reason=fault, last_lines=[NASTY]))
        await until(pilot, lambda: "WHAT HAPPENED" in text_of(app))
        assert harmless(text_of(app))
        await pilot.press("ctrl+q")
        await pilot.pause()
        assert harmless(text_of(app))
