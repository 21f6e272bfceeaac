"""Log lines: filter, level, wrap, follow and pause; only the lines in sight are drawn."""

from textual import events
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

from veloxquant.panel.state import LogLine
from veloxquant.panel.text import clean, fit, pad, width
from veloxquant.panel.theme import GLYPHS
from veloxquant.panel.widgets.clock import wall_clock

LEVELS = ("debug", "info", "warning", "error")
_SHORT = {"debug": "DEBUG", "info": "INFO", "warning": "WARN", "error": "ERROR"}
_STYLES = {
    "debug": "$faint",
    "info": "$state-busy",
    "warning": "bold $state-warn",
    "error": "bold $state-failed",
}


def head_of(line: LogLine, cells: int) -> list[tuple[str, str]]:
    """Time, level and source of one line; shorter in a narrow window."""
    level = _SHORT.get(line.level, clean(line.level, 5).upper())
    style = _STYLES.get(line.level, "$muted")
    time = wall_clock(line.wall, millis=cells >= 120)
    if cells < 70:
        return [(f"{time} ", "$muted"), (f"{level[:1]} ", style)]
    return [
        (f"{time} ", "$muted"),
        (f"{level:<5} ", style),
        (pad(fit(line.source, 10), 10) + " ", "$muted"),
    ]


def draw_line(line: LogLine, cells: int, needle: str = "") -> Content:
    """One line cut to `cells` columns, with the filter text marked."""
    head = Content.assemble(*head_of(line, cells))
    body = Content(fit(line.text, max(1, cells - head.cell_length)))
    return head + _mark(body, needle)


def _mark(body: Content, needle: str) -> Content:
    if needle and (at := body.plain.casefold().find(needle.casefold())) >= 0:
        return body.stylize("bold underline $state-warn", at, at + len(needle))
    return body


class LineLog(Widget, can_focus=True):
    """A scrolling log. `shown` is what passes filter and level; `cursor` an index into it."""

    DEFAULT_CSS = "LineLog { height: 1fr; width: 1fr; }"

    needle: reactive[str] = reactive("")
    level: reactive[str] = reactive("info")
    wrap: reactive[bool] = reactive(False)
    following: reactive[bool] = reactive(True)

    class Changed(Message):
        """What is shown, followed or picked has changed."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.shown: list[LogLine] = []
        self.cursor = 0
        self.below = 0
        self.total = 0
        self._source: tuple[LogLine, ...] = ()
        self._last = -1
        self._top = 0

    # ---- data -------------------------------------------------------------------------------

    def set_lines(self, lines: tuple[LogLine, ...]) -> None:
        """Take the newest lines; only those not seen yet are tested against the filter."""
        if lines is self._source:
            return
        grown = bool(self._source and lines) and lines[-1].seq >= self._last
        grown = grown and lines[0].seq >= self._source[0].seq
        self._source = lines
        self.total = len(lines)
        if not grown:
            self._refilter()
            return
        index = len(lines)
        while index and lines[index - 1].seq > self._last:
            index -= 1
        new = [line for line in lines[index:] if self._passes(line)]
        self._last = lines[-1].seq
        gone = 0
        while gone < len(self.shown) and self.shown[gone].seq < lines[0].seq:
            gone += 1
        if gone:
            del self.shown[:gone]
            self.cursor, self._top = max(0, self.cursor - gone), max(0, self._top - gone)
        self.shown += new
        if self.following:
            self._to_end()
        else:
            self.below += len(new)
        self.refresh()
        if new or gone:
            self.post_message(self.Changed())

    def _passes_level(self, line: LogLine) -> bool:
        rank = LEVELS.index(line.level) if line.level in LEVELS else 1
        return rank >= LEVELS.index(self.level)

    def _passes(self, line: LogLine) -> bool:
        if not self._passes_level(line):
            return False
        return not self.needle or self.needle.casefold() in (
            f"{line.source} {line.text} {line.request}".casefold()
        )

    def _refilter(self) -> None:
        picked = self.shown[self.cursor].seq if self.cursor < len(self.shown) else None
        self.shown = [line for line in self._source if self._passes(line)]
        self._last = self._source[-1].seq if self._source else -1
        self.below = 0
        if self.following or picked is None:
            self._to_end()
        else:
            # stay as near as possible to the line that was looked at
            at = [i for i, line in enumerate(self.shown) if line.seq <= picked]
            self.cursor = at[-1] if at else 0
            self._top = max(0, self.cursor - self.size.height // 2)
        self.refresh()
        self.post_message(self.Changed())

    def watch_needle(self) -> None:
        """Filter again."""
        self._refilter()

    def watch_level(self) -> None:
        """Filter again."""
        self._refilter()

    def watch_following(self, following: bool) -> None:
        """Jump to the end, or start to count."""
        self.below = 0
        if following:
            self._to_end()
        self.post_message(self.Changed())
        self.refresh()

    # ---- moving -----------------------------------------------------------------------------

    def _to_end(self) -> None:
        self.cursor = max(0, len(self.shown) - 1)
        self._top = max(0, len(self.shown) - max(1, self.size.height))

    def move(self, step: int) -> None:
        """Move the cursor; moving up pauses, reaching the end by moving down follows again."""
        if not self.shown:
            return
        before = self.cursor
        self.cursor = max(0, min(len(self.shown) - 1, self.cursor + step))
        if step < 0 and self.following:
            self.following = False
        elif step > 0 and before == self.cursor == len(self.shown) - 1:
            self.following = True
        self._top = min(self._top, self.cursor)
        self._top = max(self._top, self.cursor - max(1, self.size.height) + 1)
        self.refresh()
        self.post_message(self.Changed())

    def on_key(self, event: events.Key) -> None:
        """Arrows, vi keys, pages and ends."""
        page = max(1, self.size.height - 1)
        steps = {
            "down": 1, "j": 1, "up": -1, "k": -1,
            "pagedown": page, "pageup": -page,
            "home": -len(self.shown), "end": len(self.shown),
        }  # fmt: skip
        if (step := steps.get(event.key)) is not None:
            event.stop()
            self.move(step)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Three lines a notch."""
        event.stop()
        self.move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Three lines a notch."""
        event.stop()
        self.move(-3)

    def on_click(self, event: events.Click) -> None:
        """Put the cursor on a line."""
        index = self._top + event.y
        if not self.wrap and index < len(self.shown):
            self.move(index - self.cursor)

    def on_resize(self) -> None:
        """Keep the end, or the cursor, in sight."""
        if self.following:
            self._to_end()
        else:
            self.move(0)

    # ---- drawing ----------------------------------------------------------------------------

    @property
    def picked(self) -> LogLine | None:
        """The line under the cursor."""
        return self.shown[self.cursor] if self.cursor < len(self.shown) else None

    def _why_empty(self) -> str:
        """Which key brings lines back; the level is not cleared with the filter."""
        if not self.total:
            return "no log line yet"
        if not self.needle:
            return f"no line is {self.level} or above: v changes the level"
        if any(self._passes_level(line) for line in self._source):
            return "no line passes the filter: esc clears it"
        return f"no line is {self.level} or above: v changes the level, esc clears the filter"

    def render(self) -> Content:
        """The lines in sight, the cursor marked."""
        cells, rows = self.size
        if not self.shown:
            why = self._why_empty()
            return Content.styled(f"  {why}", "$muted")
        out: list[Content] = []
        if not self.wrap:
            out = [
                self._gutter(index) + draw_line(self.shown[index], cells - 2, self.needle)
                for index in range(self._top, min(len(self.shown), self._top + rows))
            ]
        elif self.following:
            for index in range(len(self.shown) - 1, -1, -1):
                out[:0] = self._wrapped(index, cells)
                if len(out) >= rows:
                    break
            out = out[-rows:]
        else:
            start = self._top
            while start < self.cursor and self._height(start, cells) > rows:
                start += 1
            for index in range(start, len(self.shown)):
                out += self._wrapped(index, cells)
                if len(out) >= rows:
                    break
            out = out[:rows]
        return Content("\n").join(out)

    def _gutter(self, index: int) -> Content:
        here = index == self.cursor and not self.following
        return Content.styled(f"{GLYPHS.pointer} " if here else "  ", "bold $primary")

    def _height(self, start: int, cells: int) -> int:
        return sum(len(self._wrapped(i, cells)) for i in range(start, self.cursor + 1))

    def _wrapped(self, index: int, cells: int) -> list[Content]:
        line = self.shown[index]
        head = Content.assemble(*head_of(line, cells - 2))
        room = max(8, cells - 2 - head.cell_length)
        parts, text = [], line.text
        while text and len(parts) < 40:
            cut = len(text) if width(text) <= room else max(1, len(fit(text, room)) - 1)
            parts.append(text[:cut])
            text = text[cut:]
        out = [self._gutter(index) + head + _mark(Content(parts[0] if parts else ""), self.needle)]
        indent = Content(" " * (2 + head.cell_length))
        out += [indent + _mark(Content(part), self.needle) for part in parts[1:]]
        return out
