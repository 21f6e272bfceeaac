"""Conversations as files: one JSON line a record, written by panel and keeper, read by the panel.

Records: `user` (a question), `answer` (a keeper took it), `delta` and `think` (pieces of text),
`end` (finish, figures), `fault`. One writer at a time: the panel writes `user` while no answer is
open, the keeper everything else while it holds the lock. No textual here.
"""

import fcntl
import json
import os
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

MAX_FILES = 50
MAX_LINE = 1 << 20
_MODE = 0o600

Status = Literal["open", "done", "stopped", "failed", "cut"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. Figures are those of an answer that ended; `status` of a question is `done`."""

    role: Literal["user", "model"]
    text: str = ""
    thought: str = ""
    status: Status = "done"
    model: str = ""
    finish: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float | None = None
    seconds: float | None = None
    problem: str = ""
    hint: str = ""

    @property
    def speed(self) -> float | None:
        """Tokens a second after the first one."""
        if self.seconds is None or self.ttft is None or self.output_tokens < 2:
            return None
        return (self.output_tokens - 1) / max(1e-3, self.seconds - self.ttft)


def fold(turns: tuple[Turn, ...], record: dict[str, Any]) -> tuple[Turn, ...]:
    """The conversation after one record; unknown records change nothing."""
    kind = record.get("kind")
    if kind == "user":
        return (*turns, Turn("user", str(record.get("text", ""))))
    if kind == "answer":
        return (*turns, Turn("model", status="open", model=str(record.get("model", ""))))
    if not turns or turns[-1].role != "model":
        return turns
    last = turns[-1]
    if kind == "delta":
        last = replace(last, text=last.text + str(record.get("text", "")))
    elif kind == "think":
        last = replace(last, thought=last.thought + str(record.get("text", "")))
    elif kind == "end":
        finish = str(record.get("finish", ""))
        last = replace(
            last,
            status="stopped" if finish == "stopped" else "done",
            finish=finish,
            prompt_tokens=_count(record.get("prompt_tokens")),
            output_tokens=_count(record.get("output_tokens")),
            ttft=_seconds(record.get("ttft")),
            seconds=_seconds(record.get("seconds")),
        )
    elif kind == "fault":
        last = replace(
            last,
            status="failed",
            problem=str(record.get("message", "")),
            hint=str(record.get("hint", "")),
        )
    return (*turns[:-1], last)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def to_messages(turns: tuple[Turn, ...]) -> list[dict[str, str]]:
    """The conversation as the API wants it; answers that failed empty are left out."""
    return [
        {"role": "user" if turn.role == "user" else "assistant", "content": turn.text}
        for turn in turns
        if turn.text
    ]


class Tail:
    """Reads a transcript as it grows; a half-written last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.turns: tuple[Turn, ...] = ()
        self._offset = 0
        self._rest = b""

    def read(self) -> bool:
        """Take what is new; True when the conversation changed."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return False
        if not new:
            return False
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        before, turns = self.turns, self.turns
        for line in lines:
            turns = fold(turns, _record(line))
        self.turns = turns
        return turns is not before

    @property
    def is_open(self) -> bool:
        """Whether the last answer has no end yet."""
        return bool(self.turns) and self.turns[-1].status == "open"

    def settle(self) -> bool:
        """Mark an answer as cut when nobody writes it any more; True when that was so."""
        if not self.is_open or is_locked(self.path):
            return False
        self.read()
        if not self.is_open:
            return True
        last = replace(
            self.turns[-1],
            status="cut",
            problem="The answer was cut off: its writer ended.",
            hint="ctrl+r asks again.",
        )
        self.turns = (*self.turns[:-1], last)
        return True


def _record(line: bytes) -> dict[str, Any]:
    if not line or len(line) > MAX_LINE:
        return {}
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class Writer:
    """Appends records to a transcript while holding its lock."""

    def __init__(self, path: Path) -> None:
        """Open and lock.

        Raises:
            BlockingIOError: while another writer has it.
        """
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _MODE)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise

    def write(self, **record: Any) -> None:
        """Append one record in one write, so that readers never see half of it for long."""
        os.write(self._fd, json.dumps(record, ensure_ascii=True).encode() + b"\n")

    def close(self) -> None:
        """Unlock and close."""
        os.close(self._fd)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_locked(path: Path) -> bool:
    """Whether a writer is at work."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def stop_file(path: Path) -> Path:
    """Whose existence asks the keeper of `path` to stop."""
    return path.with_suffix(".stop")


def create(folder: Path) -> Path:
    """A new, empty conversation in `folder`; the oldest beyond `MAX_FILES` are removed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"chat-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}.jsonl"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE))
    for old in _all(folder)[MAX_FILES:]:
        if not is_locked(old):
            old.unlink(missing_ok=True)
    return path


def newest(folder: Path) -> Path | None:
    """The conversation that was written to last."""
    found = _all(folder)
    return found[0] if found else None


def _all(folder: Path) -> list[Path]:
    found = []
    for path in folder.glob("chat-*.jsonl"):
        try:
            found.append((path.stat().st_mtime_ns, path))
        except OSError:
            continue
    return [path for _, path in sorted(found, reverse=True)]
