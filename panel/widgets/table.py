"""A table that picks rows: columns give way by rank when the window is narrow.

Cells are `Content`, so foreign text is never parsed. Only the rows in sight are drawn, and a new
set of rows keeps the cursor on the same key.
"""

from collections.abc import Sequence
from typing import NamedTuple

from textual import events
from textual.content import Content
from textual.geometry import Size, clamp
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget

from veloxquant.panel.text import fit, pad, width
from veloxquant.panel.theme import GLYPHS

_GAP = 2


class Column(NamedTuple):
    """One column. Rank 0 always stays; higher ranks go first. `flex` takes the room left over."""

    title: str
    cells: int
    rank: int = 0
    right: bool = False
    flex: bool = False


class Row(NamedTuple):
    """One row. `cells` are (text, style); a row that cannot be picked is drawn faint."""

    key: str
    cells: tuple[tuple[str, str], ...]
    enabled: bool = True
    mark: str = ""


class PickTable(Widget, can_focus=True):
    """Rows with a cursor; `enter` and double click pick."""

    DEFAULT_CSS = "PickTable { height: 1fr; width: 1fr; }"

    cursor: reactive[int] = reactive(0)

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, table: "PickTable", key: str) -> None:
            super().__init__()
            self.table = table
            self.key = key

        @property
        def control(self) -> "PickTable":
            """The table, so that `@on(..., "#id")` works."""
            return self.table

    class Picked(Moved):
        """A row was chosen."""

    def __init__(
        self, columns: Sequence[Column], *, empty: str = "", id: str | None = None
    ) -> None:
        super().__init__(id=id)
        self.columns = tuple(columns)
        self.rows: tuple[Row, ...] = ()
        self.empty = empty
        self.sorted_by = ""
        self._top = 0

    # ---- data -------------------------------------------------------------------------------

    def set_rows(self, rows: Sequence[Row], *, pick: str | None = None) -> None:
        """Replace all rows; the cursor stays on its key, or goes to `pick`."""
        wanted = pick if pick is not None else self.key
        if self.rows == tuple(rows) and wanted == self.key:
            return
        self.rows = tuple(rows)
        index = next((i for i, row in enumerate(self.rows) if row.key == wanted), None)
        self.cursor = index if index is not None else self._nearest(self.cursor)
        self._follow()
        self.refresh(layout=self.styles.is_auto_height)

    def set_empty(self, text: str) -> None:
        """What to say when there are no rows."""
        self.empty = text
        self.refresh()

    @property
    def key(self) -> str:
        """Key of the row under the cursor, or nothing."""
        return self.rows[self.cursor].key if 0 <= self.cursor < len(self.rows) else ""

    def _nearest(self, index: int) -> int:
        return clamp(index, 0, max(0, len(self.rows) - 1))

    def validate_cursor(self, value: int) -> int:
        """Keep the cursor inside the rows."""
        return self._nearest(value)

    def watch_cursor(self, old: int, new: int) -> None:
        """Tell about the move and scroll after it."""
        self._follow()
        if old != new and self.key:
            self.post_message(self.Moved(self, self.key))

    # ---- moving -----------------------------------------------------------------------------

    @property
    def _page(self) -> int:
        return max(1, self.size.height - 1)

    def _follow(self) -> None:
        page = self._page
        top = min(self._top, self.cursor)
        self._top = max(0, max(top, self.cursor - page + 1))
        self._top = min(self._top, max(0, len(self.rows) - page))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        """All rows and the titles, for an automatic height."""
        return max(2, len(self.rows) or self.empty.count("\n") + 1) + 1

    def on_resize(self) -> None:
        """Keep the cursor in sight."""
        self._follow()

    def on_key(self, event: events.Key) -> None:
        """Arrows, vi keys, pages and ends."""
        steps = {
            "down": 1,
            "j": 1,
            "up": -1,
            "k": -1,
            "pagedown": self._page,
            "pageup": -self._page,
            "home": -len(self.rows),
            "g": -len(self.rows),
            "end": len(self.rows),
            "G": len(self.rows),
        }
        if (step := steps.get(event.key)) is not None:
            event.stop()
            event.prevent_default()
            self.cursor += step

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Move with the wheel."""
        event.stop()
        self.cursor += 1

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Move with the wheel."""
        event.stop()
        self.cursor -= 1

    def on_click(self, event: events.Click) -> None:
        """One click moves, two pick."""
        index = self._top + event.y - 1
        if event.y >= 1 and index < len(self.rows):
            self.cursor = index
            if event.chain >= 2:
                self.post_message(self.Picked(self, self.key))

    # ---- drawing ----------------------------------------------------------------------------

    def _layout(self) -> list[tuple[int, int]]:
        """(column, width) of the columns that fit; ranks give way from the highest."""
        room = self.size.width - 3
        shown = list(range(len(self.columns)))
        while len(shown) > 1:
            need = sum(self.columns[i].cells for i in shown) + _GAP * (len(shown) - 1)
            worst = max(shown, key=lambda i: (self.columns[i].rank, i))
            if need <= room or self.columns[worst].rank == 0:
                break
            shown.remove(worst)
        need = sum(self.columns[i].cells for i in shown) + _GAP * (len(shown) - 1)
        spare = max(0, room - need)
        flexible = [i for i in shown if self.columns[i].flex]
        out = []
        for i in shown:
            extra = spare // len(flexible) if i in flexible else 0
            out.append((i, self.columns[i].cells + extra))
        return out

    def render(self) -> Content:
        """Titles, then the rows in sight, with a thumb at the right when there are more."""
        layout = self._layout()
        titles = []
        for i, cells in layout:
            column = self.columns[i]
            mark = " ▾" if column.title == self.sorted_by and GLYPHS.pointer == "❯" else ""
            title = column.title + mark if len(column.title) + 2 <= cells else column.title
            titles.append(pad(fit(title, cells), cells, right=column.right))
        lines = [Content.styled("  " + (" " * _GAP).join(titles), "bold $muted")]
        if not self.rows:
            lines.extend(Content.styled("  " + part, "$muted") for part in self.empty.split("\n"))
            return Content("\n").join(lines)
        page = self._page
        thumb = self._thumb(page)
        for offset, row in enumerate(self.rows[self._top : self._top + page]):
            lines.append(self._line(row, self._top + offset, layout, thumb == offset))
        return Content("\n").join(lines)

    def _thumb(self, page: int) -> int | None:
        if len(self.rows) <= page:
            return None
        return round(self._top / (len(self.rows) - page) * (page - 1))

    def _line(self, row: Row, index: int, layout: list[tuple[int, int]], thumb: bool) -> Content:
        picked = index == self.cursor
        mark = GLYPHS.pointer if picked else row.mark or " "
        parts: list[tuple[str, str]] = [(f"{mark} ", "bold $primary" if picked else "$state-warn")]
        used = 2
        for n, (i, cells) in enumerate(layout):
            column = self.columns[i]
            value, style = row.cells[i] if i < len(row.cells) else ("", "")
            last = n == len(layout) - 1
            # text of a last left-aligned column may run into the free room
            room = self.size.width - used - 1 if last and not column.right else cells
            shown = pad(fit(value, room), cells, right=column.right)
            if not row.enabled and not style:
                style = "$faint"
            parts.append((shown, style))
            used += width(shown)
            if not last:
                parts.append((" " * _GAP, ""))
                used += _GAP
        line = Content.assemble(*parts).pad_right(max(0, self.size.width - used - 1))
        if picked:
            # a terminal's own palette promises no contrast on its blue, reversal does
            if self.app.current_theme.ansi:
                line = Content.styled(line.plain, "bold reverse")
            else:
                line = line.stylize("bold on $pick")
        return line + Content.styled("▐" if thumb else " ", "$faint")
