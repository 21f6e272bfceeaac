"""The conversation of the panel: starts keepers, follows the transcript, survives the panel.

The app owns one desk; the chat area only draws it. Every answer is written by a keeper process
into a transcript file, so changing the area or closing the panel cancels nothing.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from veloxquant.panel import transcript
from veloxquant.panel.state import View
from veloxquant.panel.transcript import Tail, Turn, Writer

POLL_S = 0.05
# an answer that has ended leaves a process that ends at once
REAP_S = 2.0
_FOLDER = "chats"
# keepers may outlive this process; those that ended are reaped when the next one ends
_KEEPERS: list["subprocess.Popen[bytes]"] = []


class DeskError(Exception):
    """Why a question was not asked, in a sentence."""


class ChatDesk:
    """One conversation at a time; `changed` is called after every change."""

    def __init__(self, folder: Path, changed: Callable[[], None]) -> None:
        self.folder = folder / _FOLDER
        self.tail: Tail | None = None
        self._changed = changed
        self._keeper: subprocess.Popen[bytes] | None = None
        self._waiting = False

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The conversation so far."""
        return self.tail.turns if self.tail else ()

    @property
    def answering(self) -> bool:
        """Whether an answer is on its way."""
        return self._waiting or (self.tail is not None and self.tail.is_open)

    def load(self) -> None:
        """The conversation that was written to last, with whatever a keeper wrote meanwhile."""
        path = transcript.newest(self.folder)
        if path is None:
            return
        self.tail = Tail(path)
        self.tail.read()

    def new(self) -> None:
        """Begin a new conversation; a running answer goes on in its own file."""
        self.tail = None
        self._waiting = False
        self._changed()

    async def ask(self, text: str, view: View) -> None:
        """Write the question and start a keeper; returns when the answer has ended.

        Raises:
            DeskError: when no server answers, or an answer is still being written.
        """
        if self.answering:
            raise DeskError("an answer is still being written; esc stops it")
        if not view.is_serving or view.spec is None:
            raise DeskError("no server is ready; press esc, then 3 to see how it is")
        job = await asyncio.to_thread(self._write_question, text, view)
        self._waiting = True
        self._changed()
        try:
            self._keeper = await asyncio.to_thread(self._start_keeper, job)
        except OSError:
            self._waiting = False
            raise
        await self.follow()

    async def again(self, view: View) -> None:
        """Ask the last question again, in a copy of the conversation without its answer.

        Raises:
            DeskError: when there is no question, or as for `ask`.
        """
        turns = self.turns
        while turns and turns[-1].role == "model":
            turns = turns[:-1]
        if not turns:
            raise DeskError("there is no question to ask again")
        if self.answering:
            raise DeskError("an answer is still being written; esc stops it")
        kept, question = turns[:-1], turns[-1].text
        await asyncio.to_thread(self._copy, kept)
        await self.ask(question, view)

    def _copy(self, turns: tuple[Turn, ...]) -> None:
        path = transcript.create(self.folder)
        with Writer(path) as writer:
            for turn in turns:
                if turn.role == "user":
                    writer.write(kind="user", text=turn.text)
                    continue
                writer.write(kind="answer", model=turn.model)
                writer.write(kind="delta", text=turn.text)
                writer.write(
                    kind="end", finish=turn.finish, prompt_tokens=turn.prompt_tokens,
                    output_tokens=turn.output_tokens, ttft=turn.ttft, seconds=turn.seconds,
                )  # fmt: skip
        self.tail = Tail(path)
        self.tail.read()

    def _write_question(self, text: str, view: View) -> dict[str, Any]:
        if self.tail is None:
            self.tail = Tail(transcript.create(self.folder))
        with _writer(self.tail.path) as writer:
            writer.write(kind="user", text=text)
        self.tail.read()
        spec = view.spec
        assert spec is not None
        return {
            "path": str(self.tail.path),
            "host": spec.host,
            "port": view.server.port or spec.port,
            "model": "default",
            "name": view.model_name,
            "token": self._token() if spec.api_key else "",
            "parameters": {"max_tokens": spec.max_tokens, "temperature": _temperature()},
        }

    @staticmethod
    def _token() -> str:
        from veloxquant.supervisor import paths

        try:
            return paths.find().token.read_text().strip()
        except OSError:
            return ""

    @staticmethod
    def _start_keeper(job: dict[str, Any]) -> "subprocess.Popen[bytes]":
        """A process in its own session: neither closing the panel nor the terminal ends it."""
        keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", "veloxquant.panel.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert keeper.stdin is not None
        _KEEPERS.append(keeper)
        # one that ended before it read its job is noticed by `follow`
        with contextlib.suppress(BrokenPipeError):
            keeper.stdin.write(json.dumps(job).encode())
        with contextlib.suppress(BrokenPipeError):
            keeper.stdin.close()
        return keeper

    async def follow(self) -> None:
        """Read the transcript until its answer has ended, or another conversation is open."""
        tail, keeper = self.tail, self._keeper
        while tail is not None and tail is self.tail:
            ended = keeper is None or keeper.poll() is not None
            if tail.read():
                self._waiting = self._waiting and tail.turns[-1].role == "user"
                self._changed()
            if self._waiting and ended:
                # it ended without a word; the conversation says so, or it would wait for ever
                await asyncio.to_thread(_write_fault, tail.path)
                continue
            if not self._waiting:
                if tail.settle():
                    self._changed()
                if not tail.is_open:
                    break
            await asyncio.sleep(POLL_S)
        await asyncio.to_thread(_reap, keeper)

    def stop(self) -> None:
        """Ask the keeper to stop; the transcript says when it did."""
        if self.tail is not None and self.answering:
            transcript.stop_file(self.tail.path).touch(mode=0o600)


def _temperature() -> float:
    from veloxquant.config.settings import load_settings

    return load_settings().value("chat.temperature")


def _writer(path: Path) -> Writer:
    """A writer; the keeper of the answer before may hold the file for another moment."""
    deadline = time.monotonic() + REAP_S
    while True:
        try:
            return Writer(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def _write_fault(path: Path) -> None:
    with _writer(path) as writer:
        writer.write(kind="answer", model="")
        writer.write(
            kind="fault", message="The answer could not be begun.", hint="ctrl+r asks again."
        )


def _reap(keeper: "subprocess.Popen[bytes] | None") -> None:
    """Leave no zombie."""
    if keeper is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            keeper.wait(timeout=REAP_S)
    _KEEPERS[:] = [keeper for keeper in _KEEPERS if keeper.poll() is None]


def state_folder() -> Path:
    """The supervisor's state folder, made for us alone."""
    from veloxquant.supervisor import paths

    found = paths.find().state
    paths.secure_folder(found)
    return found
