import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from veloxquant.cli import exit_codes

Run = Callable[..., tuple[int, str, str]]


def chunk(text: str = "", finish: str | None = None) -> bytes:
    body = {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class Served:
    """What the server answers and what it was asked."""

    status = 200
    body = chunk("Par") + b": comment\n\n" + chunk("is \x1b[2J\u2713") + chunk("", "stop")
    body += b'data: {"choices": [], "usage": {"prompt_tokens": 3}}\n\ndata: [DONE]\n\n'

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []


@pytest.fixture
def server(supervisor: Any, tmp_path: Path) -> Iterator[Served]:
    served = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            served.asked.append((self.path, dict(self.headers), json.loads(raw)))
            self.send_response(served.status)
            self.end_headers()
            self.wfile.write(served.body)

        def log_message(self, *_: object) -> None: ...

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    (tmp_path / "token").write_text("sesame\n")
    supervisor.state("ready", spec={"model": "/x/Tiny", "name": "Tiny", "api_key": True})
    supervisor.answers["status"] |= {
        "base_url": f"http://127.0.0.1:{http.server_port}/v1",
        "token_file": str(tmp_path / "token"),
    }
    yield served
    http.shutdown()
    thread.join()
    http.server_close()


def test_one_question_streams_the_answer_without_control_characters(
    run: Run, server: Served
) -> None:
    code, out, err = run("chat", "-p", "capital?", "--max-tokens", "9", "--system", "be brief")
    assert (code, out, err) == (0, "Paris �[2J✓\n", "")
    path, headers, body = server.asked[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer sesame"
    assert (body["model"], body["stream"], body["max_tokens"]) == ("Tiny", True, 9)
    assert [m["role"] for m in body["messages"]] == ["system", "user"]


def test_json_gives_the_whole_answer(run: Run, server: Served) -> None:
    data = json.loads(run("chat", "-p", "x", "--json")[1])["data"]
    assert data == {
        "answer": "Paris \x1b[2J✓", "finish": "stop", "usage": {"prompt_tokens": 3},
    }  # fmt: skip


def test_the_question_may_come_from_standard_input(
    run: Run, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert run("chat")[0] == 0
    assert server.asked[0][2]["messages"][0]["content"] == "from a pipe"
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert run("chat", "-p", "-")[0] == exit_codes.USAGE


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, exit_codes.USAGE), (404, exit_codes.NOT_FOUND), (503, exit_codes.BUSY), (500, 1)],
)
def test_an_error_of_the_server_is_said(run: Run, server: Served, status: int, code: int) -> None:
    server.status = status
    server.body = b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'
    assert run("chat", "-p", "x") == (code, "", "error: too long\n")


def test_an_error_in_the_middle_of_the_stream(run: Run, server: Served) -> None:
    server.body = chunk("Pa") + b'data: {"error": {"message": "out of memory"}}\n\n'
    code, out, err = run("chat", "-p", "x")
    assert (code, out, err) == (exit_codes.FAILED, "Pa", "error: out of memory\n")


def test_a_stream_that_breaks_off_is_an_error(run: Run, server: Served) -> None:
    server.body = chunk("Pa")
    code, _, err = run("chat", "-p", "x")
    assert (code, "broke off" in err) == (exit_codes.NETWORK, True)


def test_a_server_that_went_away(run: Run, supervisor: Any) -> None:
    supervisor.answers["status"]["base_url"] = "http://127.0.0.1:1/v1"
    code, _, err = run("chat", "-p", "x")
    assert (code, "went away" in err) == (exit_codes.NETWORK, True)


@pytest.mark.parametrize(("phase", "code"), [("loading", 5), ("failed", 3), ("stopped", 3)])
def test_a_server_that_is_not_ready(run: Run, supervisor: Any, phase: str, code: int) -> None:
    supervisor.state(phase)
    assert run("chat", "-p", "x")[0] == code
