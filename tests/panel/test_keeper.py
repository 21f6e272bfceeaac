"""The process that writes answers: complete, stopped, refused, cut, and outliving its panel."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from stream_server import StreamServer

from veloxquant.panel import keeper, transcript
from veloxquant.panel.transcript import Tail, Writer, stop_file


@pytest.fixture
def path(tmp_path):
    made = transcript.create(tmp_path)
    with Writer(made) as writer:
        writer.write(kind="user", text="say hello")
    return made


def job(path, port, **more):
    return {"path": str(path), "host": "127.0.0.1", "port": port, "name": "tiny", **more}


def last(path):
    tail = Tail(path)
    tail.read()
    return tail.turns[-1]


def wait_for(condition, what, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)


def test_a_whole_answer(path):
    with StreamServer() as server:
        assert keeper.run(job(path, server.port, token="secret", parameters={"max_tokens": 9})) == 0
        body = server.bodies[0]
        assert server.headers[0]["Authorization"] == "Bearer secret"
    assert body["messages"] == [{"role": "user", "content": "say hello"}]
    assert body["stream"] is True
    assert body["max_tokens"] == 9
    turn = last(path)
    assert (turn.text, turn.status, turn.finish) == ("Hello wörld 漢字", "done", "stop")
    assert (turn.prompt_tokens, turn.output_tokens) == (7, 4)
    assert turn.seconds >= turn.ttft >= 0
    assert "secret" not in path.read_text()


def test_the_stop_file_cuts_the_connection(path):
    with StreamServer(hold=True) as server:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "veloxquant.panel.keeper"], stdin=subprocess.PIPE
        )
        process.stdin.write(json.dumps(job(path, server.port)).encode())
        process.stdin.close()
        wait_for(server.begun.is_set, "the stream")
        stop_file(path).touch()
        assert process.wait(10) == 0
        wait_for(server.gone.is_set, "the server to notice")
    turn = last(path)
    assert (turn.text, turn.status) == ("Hello ", "stopped")
    assert not stop_file(path).exists()


@pytest.mark.parametrize(
    ("status", "hint"), [(400, "shorter conversation"), (503, "ctrl+r"), (404, "press 3")]
)
def test_a_refusal_is_a_sentence_with_a_hint(path, status, hint):
    with StreamServer(status=status) as server:
        keeper.run(job(path, server.port))
    turn = last(path)
    assert turn.status == "failed"
    assert turn.problem == "the context is full"
    assert hint in turn.hint


def test_a_server_that_dies_in_the_middle_is_said(path):
    with StreamServer(cut=True) as server:
        keeper.run(job(path, server.port))
    turn = last(path)
    assert turn.status == "failed"
    assert turn.text == "Hello wörld 漢字", "what came is kept"
    assert "closed the connection" in turn.problem


def test_no_server_at_all(path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        keeper.run(job(path, taken.getsockname()[1]))
    assert "was lost" in last(path).problem


def test_a_second_keeper_leaves_the_first_alone(path):
    with Writer(path):
        assert keeper.run(job(path, 1)) == 1
    assert last(path).role == "user"


PANEL = """
import asyncio, sys
sys.path.insert(0, {tests!r})
import msgspec
import panel_fakes as fakes
from veloxquant.panel.app import PanelApp
from textual.widgets import TextArea

ready = msgspec.structs.replace(fakes.READY, port={port})
control = fakes.FakeControl(fakes.snapshot(ready, stats=fakes.stats()))

async def main():
    app = PanelApp(lambda: control, fakes.FakeLibrary)
    async with app.run_test(size=(80, 24)) as pilot:
        while not app.view.epoch or app.desk is None:
            await pilot.pause(0.02)
        app.action_go("chat")
        while app.screen.AREA != "chat" or not app.screen.query(TextArea):
            await pilot.pause(0.02)
        app.ask("say hello")
        while not app.desk.turns or "Hello" not in app.desk.turns[-1].text:
            await pilot.pause(0.02)
        print("streaming", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def start(script):
    return subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE)


async def test_a_killed_panel_loses_no_token(home, make_app, settled, until, text_of):
    from pathlib import Path

    tests = str(Path(__file__).parent)
    with StreamServer(hold=True) as server:
        script = textwrap.dedent(PANEL).format(tests=tests, port=server.port)
        panel = start(script)
        try:
            assert panel.stdout.readline() == b"streaming\n"
        finally:
            os.kill(panel.pid, signal.SIGKILL)
            panel.wait()
            panel.stdout.close()
        path = transcript.newest(home / "state" / "chats")
        assert transcript.is_locked(path), "the keeper still writes"
        # a new panel finds the answer half written and follows it to its end
        app = make_app(*fakes_serving())
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(pilot)
            await pilot.press("4")
            await until(pilot, lambda: "Hello" in text_of(app), "the first half")
            assert app.chat_is_answering()
            server.go.set()
            await until(pilot, lambda: "wörld" in text_of(app), "the second half")
            await until(pilot, lambda: not app.chat_is_answering(), "the end")
            assert "4 tokens" in text_of(app)
    turn = last(path)
    assert (turn.text, turn.status) == ("Hello wörld 漢字", "done")


def fakes_serving():
    import panel_fakes

    return panel_fakes.serving(3)
