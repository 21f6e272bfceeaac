"""How far each method reaches in the room there is, and what stops it."""

from textual.content import Content
from textual.reactive import reactive

from veloxquant.panel import units
from veloxquant.panel.ports import FitItem, FitReport
from veloxquant.panel.state import View
from veloxquant.panel.text import fit, pad
from veloxquant.panel.theme import GLYPHS
from veloxquant.panel.widgets.pane import Pane

_NAME = 18
_TAIL = 26


class LongestPane(Pane):
    """A bar a method up to its longest context; the mark is the context that was asked for."""

    TITLE = "LONGEST CONTEXT IN THIS ROOM"
    LIVE = False

    report: reactive[FitReport | None] = reactive(None)
    picked: reactive[str] = reactive("")

    def lines(self, view: View, cells: int, rows: int) -> list[Content]:  # noqa: ARG002
        """A bar a method, with a blank line between them when there is room."""
        report = self.report
        if report is None:
            return []
        known = [row for row in report.rows if row.max_context is not None]
        most = max([report.context, *(row.max_context or 0 for row in known)])
        spaced = rows >= 2 * len(known) + 1
        out = []
        for row in known:
            out.append(self._line(row, report, most, cells))
            if spaced:
                out.append(Content(""))
        out = out[: rows - 1]
        mark = f"{GLYPHS.limit} the {report.context:,} tokens asked for"
        out.append(Content.styled(" " * _NAME + mark, "$muted"))
        return out

    def _line(self, row: FitItem, report: FitReport, most: int, cells: int) -> Content:
        here = row.method == self.picked
        longest = row.max_context or 0
        room = max(8, cells - _NAME - _TAIL)
        full = round((room - 1) * longest / most)
        at = round((room - 1) * report.context / most)
        style = "$mem-kv" if row.fits else "$state-failed"
        line = Content.assemble(
            (GLYPHS.full * full, style), (GLYPHS.free * (room - full), "$mem-free")
        )
        line = line[:at] + Content.styled(GLYPHS.limit, "bold $ink") + line[at + 1 :]
        mark = GLYPHS.pointer if here else " "
        name = pad(fit(row.method, _NAME - 3), _NAME - 2)
        why = "made for no more" if row.limit == "native context" else row.limit
        return (
            Content.assemble((f"{mark} {name}", "bold" if here else "$muted"))
            + line
            + Content.assemble(
                (f"{units.short_tokens(longest):>6} ", "bold"), (fit(why, _TAIL - 8), "$muted")
            )
        )
