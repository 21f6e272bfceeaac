"""What commands print: results to stdout, talk to stderr; one JSON envelope; plain tables.

With `--json` every command prints one object `{schema, version, data, warnings}`, errors too
(`data` is null and `error` says code, message and hint). Bytes are integers there.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from veloxquant import __version__
from veloxquant.cli import exit_codes

SCHEMA = 1
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class CliError(Exception):
    """An error for people: one sentence, one next step, an exit code."""

    def __init__(
        self, message: str, hint: str = "", exit_code: int = exit_codes.FAILED, code: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        self.code = code or exit_codes.MEANING.get(exit_code, "failed")


def clean(text: str) -> str:
    """Foreign text without anything that a terminal would act on; line breaks stay."""
    return _CONTROL.sub("�", text)


def envelope(data: Any, warnings: Sequence[str] = (), error: CliError | None = None) -> str:
    """The JSON line of a result or an error."""
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "version": __version__,
        "data": data,
        "warnings": list(warnings),
    }
    if error is not None:
        body["error"] = {
            "code": error.code,
            "message": error.message,
            "hint": error.hint,
            "exit_code": error.exit_code,
        }
    return json.dumps(body, ensure_ascii=False)


def result(text: str) -> None:
    """Print a result."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:  # a terminal that is not UTF-8
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding), flush=True)


def talk(text: str) -> None:
    """Print what is not the result: progress, hints, warnings."""
    try:
        print(text, file=sys.stderr, flush=True)
    except UnicodeEncodeError:
        encoding = sys.stderr.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding), file=sys.stderr, flush=True)


def is_terminal() -> bool:
    """Whether talk goes to a terminal that can rewrite its last line."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def rewrite(text: str | None, *, end: bool) -> None:
    """Talk in the place of the last line, or with None leave it; `end` goes on below it.

    A line that wraps could not be taken back, so one that will be rewritten is cut.
    """
    if text is not None:
        room = shutil.get_terminal_size().columns - 1
        encoding = sys.stderr.encoding or "ascii"
        text = (text if end else text[:room]).encode(encoding, "replace").decode(encoding)
        sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.write("\n" if end else "")
    sys.stderr.flush()


def complain(error: CliError, as_json: bool) -> int:
    """Report an error; returns the exit code to leave with."""
    if as_json:
        result(envelope(None, error=error))
    else:
        talk(f"{styled('error:', 'red')} {clean(error.message)}")
        if error.hint:
            talk(f"  {clean(error.hint)}")
    return error.exit_code


def usage_error(message: str, hint: str = "") -> NoReturn:
    """Refuse what the user typed.

    Raises:
        CliError: always.
    """
    raise CliError(message, hint, exit_codes.USAGE, "usage")


def styled(text: str, *styles: str) -> str:
    """`text` with terminal styles when stderr and stdout are a terminal that wants them."""
    if (
        os.environ.get("NO_COLOR")
        or os.environ.get("TERM") == "dumb"
        or not (sys.stdout.isatty() and sys.stderr.isatty())
    ):
        return text
    return f"\x1b[{';'.join(_STYLES[s] for s in styles)}m{text}\x1b[0m"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell; those in `right` are flush right."""
    lines = [list(map(clean, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    text[0] = styled(text[0], "bold")
    return "\n".join(text)


def gib(nbytes: int | None) -> str:
    """Bytes for people, in GiB, MiB or KiB; `-` when unknown."""
    if nbytes is None:
        return "-"
    if abs(nbytes) >= 1 << 30:
        return f"{nbytes / (1 << 30):.2f} GiB"
    if abs(nbytes) >= 1 << 20:
        return f"{nbytes / (1 << 20):.1f} MiB"
    return f"{nbytes / (1 << 10):.1f} KiB"


def count(number: int | None) -> str:
    """A large number for people: 135M, 8.2B; `-` when unknown."""
    if number is None:
        return "-"
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.{int(letter == 'B')}f}{letter}"
    return str(number)
