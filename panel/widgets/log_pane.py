"""The newest log lines, for the foot of another area."""

from textual.content import Content

from veloxquant.panel.state import View
from veloxquant.panel.widgets.line_log import draw_line
from veloxquant.panel.widgets.pane import Pane


class LogPane(Pane):
    """As many of the newest lines as there are rows."""

    TITLE = "LOG"
    LIVE = False

    def basis(self, view: View) -> object:
        """The newest line names them all."""
        return view.logs[-1:], view.log_total, view.server.last_lines

    def note(self, view: View) -> str:
        """How many lines there are."""
        return f"{view.log_total:,} lines, l shows all" if view.logs else ""

    def lines(self, view: View, cells: int, rows: int) -> list[Content]:
        """Newest at the bottom; lines of the supervisor when the worker left none."""
        if not view.logs:
            last = view.server.last_lines[-rows:]
            from veloxquant.panel.text import content

            return [content(line) for line in last] or [Content.styled("no line yet", "$muted")]
        wanted = [line for line in view.logs[-200:] if line.level != "debug"][-rows:]
        return [draw_line(line, cells) for line in wanted]
