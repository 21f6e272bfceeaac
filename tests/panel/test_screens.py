"""The areas with fakes, at three sizes: what they show, what their keys do."""

import msgspec
import panel_fakes as fakes
import pytest
from textual.widgets import Input, OptionList

from veloxquant.panel.ports import CommandFailed
from veloxquant.panel.state import LinkNews
from veloxquant.panel.widgets.line_log import LineLog
from veloxquant.panel.widgets.pane import Pane
from veloxquant.panel.widgets.table import PickTable
from veloxquant.supervisor.messages import LaunchSpec, Progress, StageReport, State


def started(app) -> LaunchSpec:
    """What the last start command asked for."""
    op, args = app.fake_control.commands[-1]
    assert op == "start"
    return msgspec.convert(args["spec"], LaunchSpec)


SIZES = ((60, 18), (80, 24), (160, 50))
AREAS = (
    ("models", "1", "Qwen3-8B-4bit"),
    ("fit", "2", "turboquant_rvq"),
    ("run", "3", "footprint"),
    ("chat", "4", "Ask something"),
    ("logs", "5", "grew by 256 blocks"),
    ("profile", "6", "36 layers"),
    ("settings", "7", "server.port"),
)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_every_area_shows_its_thing_and_keeps_the_help_key(
    size, make_app, settled, until, text_of
):
    app = make_app(*fakes.serving(40))
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        assert app.current_mode == "run", "a server that runs is shown at once"
        for area, key, words in AREAS:
            if area != "run":
                await pilot.press("escape")
            await pilot.press(key)
            await until(pilot, lambda words=words: words in text_of(app), f"{words} in {area}")
            shown = text_of(app).split("\n")
            assert len(shown) == size[1]
            assert shown[-1].rstrip().endswith("? keys  ^q quit")
            assert "READY" in shown[0] or size[0] < 70


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_first_look_to_a_running_start(size, make_app, settled, until, text_of):
    app = make_app()
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        assert "Apple M2 Pro" in text_of(app)
        await pilot.press("enter")
        await until(pilot, lambda: app.fake_control.commands, "the start command")
        assert started(app).model == fakes.QWEN.path
        assert started(app).method == "turboquant_rvq"
        assert app.current_mode == "run"
        app.fake_control.send(fakes.STARTING)
        await until(pilot, lambda: "weights" in text_of(app), "the stages")
        assert "2.90/4.34 GiB" in text_of(app)
        app.fake_control.send(Progress(StageReport("weights", "done", seconds=7.1)))
        await until(pilot, lambda: "7.10 s" in text_of(app), "the new stage")
        app.fake_control.send(fakes.READY, fakes.stats())
        await until(pilot, lambda: "footprint" in text_of(app), "the gauges")


async def test_models_fit_start(make_app, settled, until, text_of):
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(pilot)
        await pilot.press("p")
        await until(pilot, lambda: "FITS UP TO" in text_of(app))
        assert "needs 1.9 GiB more" in text_of(app)
        assert "not runnable" in text_of(app)
        await pilot.press("enter")
        await until(pilot, lambda: "MEMORY AT 8,192" in text_of(app), "the table")
        await pilot.press("plus")
        await until(pilot, lambda: "MEMORY AT 16,384" in text_of(app), "the doubled context")
        await pilot.press("minus", "minus")
        await until(pilot, lambda: "MEMORY AT 4,096" in text_of(app), "the halved context")
        await pilot.press("c")
        await pilot.press(*"12k", "enter")
        await until(pilot, lambda: "MEMORY AT 12,288" in text_of(app), "the typed context")
        await pilot.press("down", "enter")
        await until(pilot, lambda: app.fake_control.commands, "the start")
        spec = started(app)
        assert (spec.method, spec.context) == ("kivi", 12_288)
        assert spec.batch == LaunchSpec(model="").batch, "planning for one is not a limit of one"
        await until(pilot, lambda: app.fake_library.last, "the start to be remembered")


async def test_settings_of_a_method_are_asked_for_and_started(make_app, settled, until, text_of):
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("p", "enter")
        await until(pilot, lambda: "MAX CTX" in text_of(app) and "kivi" in text_of(app))
        await pilot.press("down", "s")
        await until(pilot, lambda: "SETTINGS OF KIVI" in text_of(app), "the question")
        assert "residual_length=32" in text_of(app)
        await pilot.press("x", "enter")
        await until(pilot, lambda: "'x' is no setting of kivi" in text_of(app), "the refusal")
        await pilot.press("backspace", "4", "enter")
        given = {"kivi": {"bit_width_inlier": 4}}
        await until(pilot, lambda: app.fake_library.options == given, "a table with them")
        await until(pilot, lambda: "settings bit_width_inlier=4" in text_of(app))
        await pilot.press("enter")
        await until(pilot, lambda: app.fake_control.commands, "the start")
        assert (started(app).method, started(app).options) == ("kivi", given["kivi"])


async def test_planned_methods_are_collapsed_and_say_why(make_app, settled, until, text_of):
    app = make_app()
    async with app.run_test(size=(160, 50)) as pilot:
        await settled(pilot)
        await pilot.press("p", "enter")
        await until(pilot, lambda: "6 methods are documented" in text_of(app))
        assert "qjl" not in text_of(app)
        await pilot.press("v")
        await until(pilot, lambda: "qjl" in text_of(app) and "not built yet" in text_of(app))
        await pilot.press("G", "enter")
        await pilot.pause()
        assert not app.fake_control.commands, "a planned method is not started"


async def test_what_does_not_fit_is_asked_about(make_app, settled, until, text_of):
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(pilot)
        await pilot.press("p", "enter")
        await until(pilot, lambda: "MEMORY AT 8,192" in text_of(app))
        await pilot.press("c", *"128k", "enter")
        await until(pilot, lambda: "MEMORY AT 131,072" in text_of(app))
        await pilot.press(*["down"] * 3, "enter")
        await until(pilot, lambda: "THIS DOES NOT FIT NOW" in text_of(app))
        assert not app.fake_control.commands
        await pilot.press("c")
        await until(pilot, lambda: app.fake_control.commands)
        assert started(app).method == "fp16"
        assert started(app).context < 131_072


async def test_filter_and_sort_of_models(make_app, settled, until, text_of):
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(pilot)
        await pilot.press("p", "slash", *"mistral")
        await until(pilot, lambda: "Local models (1 of 4)" in text_of(app))
        await pilot.press("escape")
        await until(pilot, lambda: "Local models (4)" in text_of(app))
        await pilot.press("o")
        table = app.screen.query_one(PickTable)
        assert table.sorted_by == "NAME"
        assert table.rows[0].key == "/models/Llama-3.2-3B"
        assert table.rows[-1].key == "/models/gemma", "what cannot run comes last"


async def test_no_model_offers_the_demo_model(make_app, settled, until, text_of):
    app = make_app(models=[])
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        assert "No model on this machine yet" in text_of(app)
        await pilot.press("d")
        await until(pilot, lambda: app.fake_library.fetched and app.proposal, "the demo model")
        await until(pilot, lambda: "SmolLM2-135M-Instruct" in text_of(app))
        await pilot.press("enter")
        await until(pilot, lambda: app.fake_control.commands)
        assert started(app).model == fakes.DEMO_MODEL.path


async def test_a_fetch_that_fails_stays_on_the_screen(make_app, settled, until, text_of):
    library = fakes.FakeLibrary([])
    library.fetch_error = CommandFailed("network", "no route to the index", "try again later")
    app = make_app(library=library)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("d")
        await until(pilot, lambda: "no route to the index" in text_of(app))
        assert "try again later" in text_of(app)


# ---- what goes wrong ------------------------------------------------------------------------


async def test_a_refused_start_is_a_page_with_next_steps(make_app, settled, until, text_of):
    app = make_app()
    app.fake_control.refusals["start"] = CommandFailed(
        "port_taken", "Port 8000 is held by python3, pid 4711.", "Take another."
    )
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: "held by python3, pid 4711" in text_of(app))
        assert "WHAT YOU CAN DO" in text_of(app)
        assert "NOT STARTED" in text_of(app)
        del app.fake_control.refusals["start"]
        await pilot.press("n")
        await until(pilot, lambda: len(app.fake_control.commands) == 2)
        assert started(app).port == 8001


async def test_a_failed_state_and_its_first_step(make_app, settled, until, text_of):
    app = make_app(fakes.snapshot(fakes.FAILED, logs=fakes.logs(3), seq=3))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await until(pilot, lambda: "in use by another program" in text_of(app))
        assert "pid 4711" in text_of(app)
        assert app.screen.query_one(OptionList).highlighted == 0
        await pilot.press("enter")
        await until(pilot, lambda: app.fake_control.commands)
        assert started(app).port == 8001


async def test_old_gauges_are_grey_and_say_so(make_app, settled, until, text_of):
    app = make_app(*fakes.serving(5))
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(pilot)
        assert "no news" not in text_of(app)
        app.fake_now += 6.0
        app.poke()
        await until(pilot, lambda: "no news for 6 s" in text_of(app))
        assert "values are old" in text_of(app)
        app.fake_now += 5.0
        app.poke()
        await until(pilot, lambda: "UNRESPONSIVE 11 s" in text_of(app))
        app.fake_control.send(fakes.stats(61))
        await until(pilot, lambda: "READY" in text_of(app))


async def test_a_lost_supervisor_is_named(make_app, settled, until, text_of):
    from veloxquant.panel.state import LinkNews

    app = make_app(*fakes.serving(5))
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(pilot)
        app.fake_control.queue.put_nowait(LinkNews(False, "the supervisor closed the link"))
        await until(pilot, lambda: "the supervisor closed the link" in text_of(app))
        assert "connection lost" in text_of(app)


async def test_what_cannot_connect_is_said_and_does_not_block(make_app, until, text_of):
    control = fakes.FakeControl()
    control.connect_error = CommandFailed("not_connected", "the folder is not yours", "see doctor")
    app = make_app(control=control)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.view.link == "refused" and app.checks is not None)
        await pilot.press("3")
        await until(pilot, lambda: "the folder is not yours" in text_of(app))
        await pilot.press("1")
        await until(pilot, lambda: "Qwen3-8B-4bit" in text_of(app))


# ---- stopping and leaving -------------------------------------------------------------------


async def test_stop_asks_once_and_names_it(make_app, settled, until, text_of):
    app = make_app(*fakes.serving(5))
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(pilot)
        await pilot.press("x")
        await until(pilot, lambda: "STOP THE SERVER" in text_of(app))
        assert "2 running answers" in text_of(app)
        await pilot.press("escape")
        assert not app.fake_control.commands
        await pilot.press("x", "enter")
        await until(pilot, lambda: app.fake_control.commands == [("stop", {"grace": 10.0})])
        app.fake_control.send(State(phase="stopped", spec=fakes.SPEC))
        await until(pilot, lambda: "No server is running" in text_of(app))


async def test_another_start_asks_before_it_replaces(make_app, settled, until, text_of):
    app = make_app(*fakes.serving(5))
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(pilot)
        app.start(LaunchSpec(model="/models/other"))
        await until(pilot, lambda: "A SERVER IS RUNNING" in text_of(app))
        await pilot.press("s")
        await until(pilot, lambda: len(app.fake_control.commands) == 2)
        assert [op for op, _ in app.fake_control.commands] == ["stop", "start"]


@pytest.mark.parametrize(
    ("key", "commands", "ends"),
    [("k", [], True), ("s", ["stop"], True), ("escape", [], False)],
)
async def test_leaving_asks_about_the_server(
    key, commands, ends, make_app, settled, until, text_of
):
    app = make_app(*fakes.serving(5))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("ctrl+q")
        await until(pilot, lambda: "CLOSE THE PANEL" in text_of(app))
        await pilot.press(key)
        if ends:
            await until(pilot, lambda: not app.is_running or app._exit, "the end")
        else:
            await pilot.pause()
            assert not app._exit
        assert [op for op, _ in app.fake_control.commands] == commands


async def test_leaving_without_a_server_asks_nothing(make_app, settled):
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("ctrl+q")
        await pilot.pause()
        assert app._exit
    assert app.fake_control.closed
    assert not app.fake_control.commands


# ---- the rest -------------------------------------------------------------------------------


async def test_letters_typed_into_a_field_do_nothing_else(make_app, settled, until):
    app = make_app(*fakes.serving(5))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("5", "slash", *"x1r")
        await until(pilot, lambda: app.screen.query_one(Input).value == "x1r")
        assert app.current_mode == "logs"
        assert not app.fake_control.commands


async def test_a_paused_view_stands_still(make_app, settled, until, text_of):
    app = make_app(*fakes.serving(5))
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(pilot)
        await pilot.press("space")
        await until(pilot, lambda: "PAUSED" in text_of(app))
        before = [line for line in text_of(app).split("\n") if "footprint" in line]
        app.fake_control.send(fakes.stats(10))
        await until(pilot, lambda: app.view.stats.engine_step == 400)
        assert [line for line in text_of(app).split("\n") if "footprint" in line] == before
        await pilot.press("space")
        await until(pilot, lambda: "PAUSED" not in text_of(app))


async def test_help_and_palette_know_the_area(make_app, settled, until, text_of):
    app = make_app(*fakes.serving(5))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("question_mark")
        await until(pilot, lambda: "restart with the same settings" in text_of(app))
        await pilot.press("escape", "ctrl+p")
        await until(pilot, lambda: "stop the server" in text_of(app), "the palette")


async def test_no_colour_still_says_everything(make_app, settled, until, monkeypatch, text_of):
    monkeypatch.setenv("NO_COLOR", "1")
    app = make_app(*fakes.serving(5))
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(pilot)
        await until(pilot, lambda: "gap +4% ok" in text_of(app), "the gauges")
        shown = text_of(app)
        assert "READY" in shown
        assert "[3 Run]" in shown


async def test_news_that_shows_nothing_new_draws_nothing(make_app, settled, until, text_of):
    app = make_app(*fakes.serving(5))
    async with app.run_test(size=(160, 50)) as pilot:
        await settled(pilot)
        await until(pilot, lambda: "gap +4% ok" in text_of(app), "the gauges")
        stats = app.view.stats
        for _ in range(3):  # the layout comes to rest, and history has its point
            app.fake_control.send(stats, t=9_000.0)
            await pilot.pause(0.2)
        drawn = []
        for pane in app.screen.query(Pane):
            pane.render = lambda pane=pane: drawn.append(pane) or type(pane).render(pane)
        app.fake_control.send(msgspec.structs.replace(stats, engine_step=77_777), t=9_000.1)
        await until(pilot, lambda: app.view.stats.engine_step == 77_777)
        await pilot.pause()
        assert not drawn
        app.fake_control.send(msgspec.structs.replace(stats, footprint=7 << 30), t=9_000.2)
        await until(pilot, lambda: "7.00 GiB" in text_of(app), "the new footprint")
        assert {type(pane).__name__ for pane in drawn} == {"MemoryPane"}


async def test_before_the_supervisor_answers_no_start_is_offered(make_app, until, text_of):
    app = make_app(control=fakes.FakeControl())
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.checks is not None, "the checks")
        await until(pilot, lambda: "looking for a running server" in text_of(app))
        assert "port 8000" not in text_of(app)
        assert "start it" not in text_of(app)
        app.fake_control.queue.put_nowait(fakes.snapshot())
        await until(pilot, lambda: "start it" in text_of(app))
        await until(pilot, lambda: "port 8000 is taken" in text_of(app))


async def test_a_server_lost_with_its_supervisor_is_said(make_app, settled, until, text_of):
    app = make_app(*fakes.serving(5))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await until(pilot, lambda: app.current_mode == "run")
        reborn = msgspec.structs.replace(fakes.snapshot(), epoch="another")
        for news in (LinkNews(False, "gone"), LinkNews(True), reborn):
            app.fake_control.queue.put_nowait(news)
        await until(pilot, lambda: "lost when its supervisor ended at" in text_of(app))
        await pilot.press("r")
        await until(pilot, lambda: app.fake_control.commands, "the start")
        assert started(app).model == fakes.SPEC.model


async def test_the_shown_batch_is_started_once_it_was_chosen(make_app, settled, until, text_of):
    app = make_app()
    most = LaunchSpec(model="").batch
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("p", "enter")
        await until(pilot, lambda: f"for 1; up to {most} at once" in text_of(app))
        await until(pilot, lambda: "trained" in text_of(app) or "MEMORY AT" in text_of(app))
        assert " c type" in text_of(app)
        assert " b batch" in text_of(app)
        assert " v all" in text_of(app)
        await pilot.press("b")
        await until(pilot, lambda: "for 2 at once" in text_of(app))
        await until(pilot, lambda: app.screen.report and app.screen.report.batch == 2)
        await pilot.press("enter")
        await until(pilot, lambda: app.fake_control.commands, "the start")
        assert started(app).batch == 2


async def test_an_empty_log_names_the_key_and_writes_nothing(
    make_app, settled, until, text_of, home
):
    app = make_app(*fakes.serving(5))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("5")
        await until(pilot, lambda: app.current_mode == "logs" and app.screen.query(LineLog))
        app.screen.query_one(Input).value = "nothing says this"
        await until(pilot, lambda: "esc clears it" in text_of(app))
        await pilot.press("e")
        await until(pilot, lambda: [n for n in app._notifications if "nothing was" in n.message])
        assert not list(home.rglob("log-*.txt"))
        app.screen.query_one(Input).value = ""
        quiet = fakes.snapshot(fakes.READY, seq=9_999, logs=fakes.logs(1))
        app.fake_control.queue.put_nowait(msgspec.structs.replace(quiet, epoch="another"))
        app.screen.query_one(LineLog).level = "error"
        await until(pilot, lambda: "v changes the level" in text_of(app))
