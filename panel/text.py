"""The only door for foreign text: logs, model names, model output, errors, file names.

A log line may hold escape sequences that set the window title, write the clipboard or swallow the
frame, and `[red]` in a name must not become markup. What comes out of here is printable, capped,
and wrapped in `Content`, which Textual never parses.
"""

import re
import textwrap
from collections.abc import Mapping

from textual.content import Content

MAX_LINE = 4_096
MAX_BLOCK = 400_000
ELLIPSIS = "…"

# C0, DEL, C1, soft hyphen, bidi and zero-width controls, line separators, annotation marks, tags,
# lone surrogates (they cannot be encoded and would end the program).
_BAD = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_KEEP_LINES = {"\n": "\n", "\t": "    ", "\r": ""}
_ONE_LINE = {"\n": "⏎", "\t": "  ", "\r": ""}


def _symbol(char: str) -> str:
    """A visible stand-in for one unprintable character."""
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"‹{code:x}›"


def clean(text: object, limit: int = MAX_LINE) -> str:
    """Foreign text as one printable line of at most `limit` characters."""
    line = str(text)
    cut = len(line) > limit
    if cut:
        line = line[:limit]
    if _BAD.search(line):
        line = _BAD.sub(lambda m: _ONE_LINE.get(m[0]) or _blank(m[0], _ONE_LINE), line)
    return line + ELLIPSIS if cut else line


def clean_block(text: object, limit: int = MAX_BLOCK) -> str:
    """Foreign text of several lines, printable; line ends stay, tabs become spaces."""
    block = str(text)
    cut = len(block) > limit
    if cut:
        block = block[:limit]
    if _BAD.search(block):
        block = _BAD.sub(lambda m: _KEEP_LINES.get(m[0]) or _blank(m[0], _KEEP_LINES), block)
    return block + f"\n{ELLIPSIS} cut after {limit:,} characters" if cut else block


def _blank(char: str, table: dict[str, str]) -> str:
    return "" if char in table else _symbol(char)


def content(text: object, style: str = "", limit: int = MAX_LINE) -> Content:
    """Foreign text as one line that Textual will not parse."""
    return Content.styled(clean(text, limit), style) if style else Content(clean(text, limit))


def width(text: str) -> int:
    """Terminal cells that a cleaned line takes; wide characters take two."""
    return Content(text).cell_length


def fit(text: object, cells: int, *, tail: bool = False) -> str:
    """Foreign text cut to `cells` terminal cells; `tail` keeps the end (paths, model names)."""
    line = clean(text)
    if cells <= 0:
        return ""
    if line.isascii():
        if len(line) <= cells:
            return line
        return (
            ELLIPSIS + line[-(cells - 1) :] if tail and cells > 1 else line[: cells - 1] + ELLIPSIS
        )
    if width(line) <= cells:
        return line
    chars = reversed(line) if tail else iter(line)
    kept: list[str] = []
    room = cells - 1
    for char in chars:
        room -= width(char)
        if room < 0:
            break
        kept.append(char)
    return ELLIPSIS + "".join(reversed(kept)) if tail else "".join(kept) + ELLIPSIS


def hang(text: str, cells: int, indent: int) -> str:
    """Printable text on lines of `cells` columns, those after the first indented."""
    if cells <= indent + 8:
        return text
    return "\n".join(textwrap.wrap(text, cells, subsequent_indent=" " * indent)) or text


def pad(text: str, cells: int, *, right: bool = False) -> str:
    """A cleaned line padded with blanks to `cells` terminal cells; `right` aligns to the right."""
    gap = " " * max(0, cells - width(text))
    return gap + text if right else text + gap


def settings_words(options: Mapping[str, object]) -> str:
    """Settings of a method in words, as they are typed; what is unset stays empty."""
    return " ".join(f"{name}={_typed(value)}" for name, value in options.items())


def _typed(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
