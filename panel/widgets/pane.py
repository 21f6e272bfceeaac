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

    view: reactive[View] = reactive(View, repaint=False)
    now: reactive[float] = reactive(0.0, repaint=False)
    _drawn: Content | None = None
    _note: str = ""
    _basis: tuple[object, ...] = ()

    def on_mount(self) -> None:
        """The title is ours, never foreign text."""
        self.border_title = Content(self.TITLE)

    def watch_view(self, view: View) -> None:
        """Keep the right end of the border in step."""
        if not self._in_sight():
            return
        note = self.note(view)
        if note != self._note:
            self._note = note
            self.border_subtitle = Content.styled(note, "$muted") if note else ""
        basis = (self.basis(view), view.link, freshness(view, self.now))
        if basis != self._basis:
            self._basis = basis
            self._renew()

    def watch_now(self) -> None:
        """Time alone changes a pane only when its values become old."""
        if self._basis and self._basis[-1] != freshness(self.view, self.now):
            self.watch_view(self.view)

    def on_show(self) -> None:
        """Catch up with what was missed out of sight."""
        self.watch_view(self.view)

    def _in_sight(self) -> bool:
        return all(node.display for node in self.ancestors_with_self if isinstance(node, Widget))

    def _renew(self) -> None:
        """Draw again only what looks different: the view is new several times a second."""
        drawn = self._drawn
        if drawn is None or not drawn.is_same(self._content()):
            self.refresh()

    def basis(self, view: View) -> object:
        """What the lines are made of; while it is equal nothing is drawn again."""
        return view

    def note(self, view: View) -> str:  # noqa: ARG002 - subclasses read it
        """A short word for the right end of the title line."""
        return ""

    def lines(self, view: View, cells: int, rows: int) -> list[Content]:
        """Lines to draw in `cells` columns and `rows` rows."""
        raise NotImplementedError

    def render(self) -> Content:
        """The lines, cut to the rows there are."""
        self._drawn = self._content()
        return self._drawn

    def _content(self) -> Content:
        cells, rows = self.size
        if cells <= 0 or rows <= 0:
            return Content("")
        lines = self.lines(self.view, cells, rows)[:rows]
        late = self.LIVE and freshness(self.view, self.now) != "fresh"
        if late or self.view.link == "lost":
            lines = [Content.styled(line.plain, "$faint") for line in lines]
        return Content("\n").join(lines)
