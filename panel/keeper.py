"""Writes one answer into a transcript: a small process that outlives the panel.

Started by the panel as `python -P -m veloxquant.panel.keeper` with the job as JSON on standard
input. It owns the HTTP request, so that closing the panel loses no token. Standard library only.
"""

import contextlib
import http.client
import json
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from veloxquant.panel.transcript import Tail, Writer, stop_file, to_messages

CONNECT_S = 10.0
# reading a long prompt sends nothing for minutes
SILENCE_S = 1800.0
POLL_S = 0.05
MAX_EVENT = 1 << 20


class AnswerError(Exception):
    """Why there is no answer, and what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Stop:
    """Cuts the connection when the stop file appears or the process is asked to end."""

    def __init__(self, path: Path) -> None:
        self.asked = False
        self.finished = threading.Event()
        self._file = stop_file(path)
        self._file.unlink(missing_ok=True)
        self._socket: socket.socket | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def guard(self, connection: http.client.HTTPConnection) -> None:
        """The connection to cut."""
        self._socket = connection.sock
        if self.asked:
            self._cut()

    def ask(self, *_: object) -> None:
        """Stop now."""
        self.asked = True
        self._cut()

    def _cut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        while not self.finished.wait(POLL_S):
            if self._file.exists():
                self._file.unlink(missing_ok=True)
                self.ask()


def run(job: dict[str, Any]) -> int:
    """Do one job: path, host, port, model, name, token, parameters. Returns the exit code."""
    path = Path(job["path"])
    try:
        writer = Writer(path)
    except BlockingIOError:
        return 1  # somebody answers already
    with writer:
        tail = Tail(path)
        tail.read()
        stop = Stop(path)
        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            signal.signal(signal.SIGTERM, stop.ask)
        writer.write(kind="answer", model=job.get("name", ""), at=time.time())
        try:
            _answer(job, to_messages(tail.turns), writer, stop)
        except AnswerError as error:
            if stop.asked:
                writer.write(kind="end", finish="stopped")
            else:
                writer.write(kind="fault", message=error.message, hint=error.hint)
        finally:
            stop.finished.set()
    return 0


def _answer(
    job: dict[str, Any], messages: list[dict[str, str]], writer: Writer, stop: Stop
) -> None:
    host, port = job["host"], job["port"]
    body = {
        **job.get("parameters", {}),
        "model": job.get("model", "default"),
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if token := job.get("token"):
        headers["Authorization"] = f"Bearer {token}"
    connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
    started = time.monotonic()
    try:
        connection.connect()
        connection.sock.settimeout(SILENCE_S)
        stop.guard(connection)
        connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _refused(response.status, response.read(64 << 10))
        _stream(response, writer, stop, started)
    except (OSError, http.client.HTTPException) as error:
        raise AnswerError(
            f"The connection to {host}:{port} was lost ({type(error).__name__}).",
            "Press 3 to see how the server is; ctrl+r asks again.",
        ) from error
    finally:
        connection.close()


def _stream(response: http.client.HTTPResponse, writer: Writer, stop: Stop, started: float) -> None:
    finish, first, count, usage = "", None, 0, {}
    while True:
        line = response.readline(MAX_EVENT)
        if not line:
            break
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            finish = finish or "stop"
            break
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            continue
        if not isinstance(event, dict):
            continue
        if isinstance(error := event.get("error"), dict):
            raise AnswerError(str(error.get("message", "the server reported an error")))
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            for kind, text in (("think", thought), ("delta", delta.get("content"))):
                if text:
                    first = first if first is not None else time.monotonic() - started
                    count += 1
                    writer.write(kind=kind, text=str(text))
            finish = choice.get("finish_reason") or finish
    if stop.asked:
        finish = "stopped"
    if not finish:
        raise AnswerError(
            "The server closed the connection before the answer was complete.",
            "Press 3 to see how the server is; ctrl+r asks again.",
        )
    writer.write(
        kind="end",
        finish=finish,
        prompt_tokens=usage.get("prompt_tokens", 0),
        output_tokens=usage.get("completion_tokens", count),
        ttft=first,
        seconds=time.monotonic() - started,
    )


def _refused(status: int, body: bytes) -> AnswerError:
    """The sentence of an OpenAI error object, with a hint by status."""
    message = f"the server answered {status}"
    try:
        error = json.loads(body)["error"]
        message = str(error["message"]) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    hints = {
        400: "A shorter conversation may help: ctrl+n begins a new one.",
        401: "The server wants a key; restart it from the panel.",
        404: "The model is not the one that runs; press 3.",
        429: "The server is full; ctrl+r asks again.",
        503: "The server is loading or full; ctrl+r asks again.",
    }
    return AnswerError(message, hints.get(status, "ctrl+r asks again."))


def main() -> int:
    """Read the job and do it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal may go; the answer goes on
    return run(json.loads(sys.stdin.buffer.read()))


if __name__ == "__main__":
    sys.exit(main())
