"""A titled area that draws the view; subclasses say what, in the room they have."""

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from veloxquant.panel.state import View, freshness


class Pane(Widget):
    """Draws `lines()` into a border that carries the title; stale values are drawn faint."""

    DEFAULT_CSS = "Pane { border-title-style: bold; border-subtitle-style: none; }"
    TITLE = ""
    # whether the values go out of date when the worker is silent
    LIVE = True

    view: reactive[View] = reactive(View)
    now: reactive[float] = reactive(0.0, layout=False)

    def on_mount(self) -> None:
        """The title is ours, never foreign text."""
        self.border_title = Content(self.TITLE)

    def watch_view(self, view: View) -> None:
        """Keep the right end of the border in step."""
        note = self.note(view)
        self.border_subtitle = Content.styled(note, "$muted") if note else ""

    def note(self, view: View) -> str:  # noqa: ARG002 - subclasses read it
        """A short word for the right end of the title line."""
        return ""

    def lines(self, view: View, cells: int, rows: int) -> list[Content]:
        """Lines to draw in `cells` columns and `rows` rows."""
        raise NotImplementedError

    def render(self) -> Content:
        """The lines, cut to the rows there are."""
        cells, rows = self.size
        if cells <= 0 or rows <= 0:
            return Content("")
        lines = self.lines(self.view, cells, rows)[:rows]
        late = self.LIVE and freshness(self.view, self.now) != "fresh"
        if late or self.view.link == "lost":
            lines = [Content.styled(line.plain, "$faint") for line in lines]
        return Content("\n").join(lines)
