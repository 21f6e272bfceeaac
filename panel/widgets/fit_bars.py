"""Memory at the chosen context, a bar a method, against the room there is now."""

from textual.content import Content
from textual.geometry import Size
from textual.reactive import reactive

from veloxquant.panel import units
from veloxquant.panel.ports import FitItem, FitReport
from veloxquant.panel.state import View
from veloxquant.panel.text import fit, pad
from veloxquant.panel.theme import GLYPHS
from veloxquant.panel.widgets.gauge import Part, bar
from veloxquant.panel.widgets.pane import Pane

_NAME = 18


def parts_of(row: FitItem, weights: int) -> list[Part]:
    """Weights, KV, and what only the reading of the prompt needs."""
    kv = row.kv or 0
    prompt = max(0, (row.peak or 0) - weights - kv)
    return [
        (weights, GLYPHS.weights, "$mem-weights"),
        (kv, GLYPHS.kv, "$mem-kv"),
        (prompt, GLYPHS.prompt, "$mem-prompt"),
    ]


def highlighted(report: FitReport, picked: str, room: int) -> list[FitItem]:
    """The picked method, fp16 to compare with, then others in table order, at most `room`."""
    ready = [row for row in report.rows if row.ready and row.kv is not None]
    first = [row for row in ready if row.method in (picked, "fp16")]
    rest = [row for row in ready if row not in first]
    chosen = (first + rest)[: max(1, room)]
    return [row for row in ready if row in chosen]


class FitBars(Pane):
    """Bars with one scale, so that lengths compare."""

    TITLE = "MEMORY"
    LIVE = False

    report: reactive[FitReport | None] = reactive(None, layout=True)
    picked: reactive[str] = reactive("")

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        """A bar and a blank line a method, for an automatic height."""
        ready = [row for row in self.report.rows if row.ready] if self.report else []
        return max(4, 2 * len(ready) + 1)

    def watch_report(self, report: FitReport | None) -> None:
        """Name the context and the room in the title, which every size shows."""
        at = f"MEMORY AT {report.context:,} TOKENS" if report else "MEMORY"
        room = f"  room now {units.size(report.room)}" if report else ""
        self.border_title = Content.assemble(at, (room, "$muted"))

    def lines(self, view: View, cells: int, rows: int) -> list[Content]:  # noqa: ARG002
        """A bar a method, then what the glyphs mean."""
        report = self.report
        if report is None:
            return []
        spaced = rows >= 10
        room = (rows - 1) // 2 if spaced else rows - 1
        chosen = highlighted(report, self.picked, room)
        most = max([report.room, *(row.peak or 0 for row in chosen)])
        # beyond twice the room only the fact counts, not the length
        scale = round(min(most, 2 * report.room or most) * 1.04)
        amount = 10
        out = []
        for row in chosen:
            here = row.method == self.picked
            mark = GLYPHS.pointer if here else " "
            name = pad(fit(row.method, _NAME - 2), _NAME - 2)
            out.append(
                Content.assemble((f"{mark} {name}", "bold" if here else "$muted"))
                + bar(parts_of(row, report.weights), report.room, cells - _NAME - amount, scale)
                + Content.styled(
                    f"{units.short_size(row.peak):>{amount}}",
                    "" if row.fits else "bold $state-failed",
                )
            )
            if spaced:
                out.append(Content(""))
        out.append(
            Content.assemble(
                (" " * _NAME, ""),
                (GLYPHS.weights, "$mem-weights"), (" weights  ", "$muted"),
                (GLYPHS.kv, "$mem-kv"), (" kv  ", "$muted"),
                (GLYPHS.prompt, "$mem-prompt"), (" while reading the prompt  ", "$muted"),
                (GLYPHS.limit, "bold"), (" room", "$muted"),
            )
        )  # fmt: skip
        return out
