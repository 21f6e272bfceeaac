"""Asking, stopping, asking again and changing the area while an answer is written."""

import msgspec
import panel_fakes as fakes
from stream_server import StreamServer

from veloxquant.panel.screens.chat import Prompt


def serving_at(port):
    return fakes.snapshot(msgspec.structs.replace(fakes.READY, port=port), stats=fakes.stats())


async def ready_to_type(pilot, until, app):
    await until(pilot, lambda: app.desk is not None)
    await pilot.press("4")
    await until(pilot, lambda: isinstance(app.screen.focused, Prompt))


async def test_an_answer_goes_on_behind_another_area(make_app, settled, until, text_of):
    with StreamServer(hold=True) as server:
        app = make_app(serving_at(server.port))
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(pilot)
            await ready_to_type(pilot, until, app)
            await pilot.press(*"hi", "enter")
            await until(pilot, lambda: "Hello" in text_of(app), "the first half")
            await pilot.press("ctrl+q")
            await until(pilot, lambda: "An answer is being written" in text_of(app))
            await pilot.press("escape")
            app.action_go("logs")
            server.go.set()
            await until(pilot, lambda: not app.chat_is_answering(), "the end")
            app.action_go("chat")
            await until(pilot, lambda: "wörld 漢字" in text_of(app), "the whole answer")
            assert "11/131,072 tokens" in text_of(app)
            await pilot.press(*"and", "enter")
            await until(pilot, lambda: len(server.bodies) == 2)
            roles = [message["role"] for message in server.bodies[1]["messages"]]
            assert roles == ["user", "assistant", "user"]
            await until(pilot, lambda: not app.chat_is_answering())


async def test_escape_stops_and_retry_asks_again(make_app, settled, until, text_of):
    with StreamServer(hold=True) as server:
        app = make_app(serving_at(server.port))
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(pilot)
            await ready_to_type(pilot, until, app)
            await pilot.press(*"hi", "enter")
            await until(pilot, lambda: "Hello" in text_of(app))
            assert "esc again stops the answer" in text_of(app)
            await pilot.press("escape")
            await until(pilot, lambda: "esc stops the answer" in text_of(app))
            assert app.chat_is_answering(), "leaving the field stops nothing"
            await pilot.press("escape")
            await until(pilot, lambda: "stopped by you" in text_of(app))
            server.go.set()
            await pilot.press("ctrl+r")
            await until(pilot, lambda: len(server.bodies) == 2)
            await until(pilot, lambda: "wörld" in text_of(app))
            assert server.bodies[1]["messages"] == [{"role": "user", "content": "hi"}]
            await until(pilot, lambda: not app.chat_is_answering())
            await pilot.press("ctrl+n")
            await until(pilot, lambda: "Ask something" in text_of(app))


async def test_without_a_server_nothing_is_lost(make_app, settled, until, text_of):
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await ready_to_type(pilot, until, app)
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "no server is ready" in text_of(app))
        assert app.screen.query_one(Prompt).text == "hi", "the question stays in its field"
        assert not app.desk.turns


async def test_a_keeper_that_cannot_begin_is_said(make_app, settled, until, text_of, monkeypatch):
    from veloxquant.panel import chat_desk

    monkeypatch.setattr(chat_desk.sys, "executable", "/bin/false")
    app = make_app(serving_at(1))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await ready_to_type(pilot, until, app)
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "could not be begun" in text_of(app))
        await until(pilot, lambda: not app.chat_is_answering())


async def test_the_file_of_an_answer_that_just_ended_is_waited_for(tmp_path):
    import threading

    from veloxquant.panel import transcript
    from veloxquant.panel.chat_desk import _writer

    path = transcript.create(tmp_path)
    first = transcript.Writer(path)
    threading.Timer(0.1, first.close).start()
    _writer(path).close()
