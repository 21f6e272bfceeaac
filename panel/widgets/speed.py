"""How fast it answers, and what it is answering."""

from textual.content import Content

from veloxquant.panel import units
from veloxquant.panel.state import OPEN_REQUESTS, View
from veloxquant.panel.text import clean, fit, pad
from veloxquant.panel.widgets.chart import nice_top, sparkline
from veloxquant.panel.widgets.gauge import flow
from veloxquant.panel.widgets.pane import Pane
from veloxquant.supervisor.messages import Request

_STATES = {
    "queued": "$muted",
    "prefill": "$state-busy",
    "decode": "$state-ready",
    "done": "$muted",
    "failed": "$state-failed",
    "cancelled": "$state-warn",
    "refused": "$state-warn",
}
_COLUMNS = (
    ("ID", 6, False),
    ("STATE", 9, False),
    ("PROMPT", 8, True),
    ("OUT", 6, True),
    ("TTFT", 7, True),
    ("TOK/S", 6, True),
)


class SpeedPane(Pane):
    """Decode and prefill speed, time to the first token, and the last minutes as a chart."""

    TITLE = "SPEED"

    def basis(self, view: View) -> object:
        """Speeds and their history."""
        s = view.stats
        return s and (s.decode_tps, s.prefill_tps, s.ttft_p50, s.ttft_p95, view.history)

    def note(self, view: View) -> str:
        """Span of the chart."""
        if len(view.history) < 2:
            return ""
        return f"last {units.ago(view.history[-1].t - view.history[0].t)}"

    def lines(self, view: View, cells: int, rows: int) -> list[Content]:
        """Words, then the chart in what is left."""
        stats = view.stats
        if stats is None:
            return [Content.styled("waiting for the first figures", "$muted")]
        words = [
            Content.assemble(("decode ", "$muted"), (units.speed(stats.decode_tps), "bold")),
            Content.assemble(("prefill ", "$muted"), (units.speed(stats.prefill_tps), "bold")),
            Content.assemble(("first token p50 ", "$muted"), units.seconds(stats.ttft_p50 or None)),
            Content.assemble(("p95 ", "$muted"), units.seconds(stats.ttft_p95 or None)),
        ]
        out = flow(words, cells)
        spare = rows - len(out)
        if spare > 0 and view.history:
            values = [point.decode_tps for point in view.history]
            if spare >= 4:
                out.append(Content(""))
                spare -= 1
            top = nice_top(max(values))
            out += sparkline(values, cells, spare, "$state-ready", _tps, top)
        return out


def _tps(value: float) -> str:
    return f"{value:.0f}" if value >= 1 or value == 0 else f"{value:.1f}"


class RequestPane(Pane):
    """Counts, then the newest requests, running ones first."""

    TITLE = "REQUESTS"

    def basis(self, view: View) -> object:
        """Counts and requests."""
        s = view.stats
        return s and (s.running, s.waiting, s.done, s.failed, s.cancelled, view.requests)

    def lines(self, view: View, cells: int, rows: int) -> list[Content]:
        """Counts on the first line, then as many requests as fit."""
        stats = view.stats
        if stats is None:
            return [Content.styled("none yet", "$muted")]
        words = [
            Content.assemble((f"{name} ", "$muted"), (str(count), style if count else "$muted"))
            for name, count, style in (
                ("running", stats.running, "bold $state-ready"),
                ("waiting", stats.waiting, "bold $state-warn"),
                ("done", stats.done, "bold"),
                ("failed", stats.failed, "bold $state-failed"),
                ("cancelled", stats.cancelled, "$state-warn"),
            )
        ]
        out = flow(words, cells, 2)
        spare = rows - len(out)
        if spare < 2 or not view.requests:
            if spare > 0 and not view.requests:
                out.append(Content.styled("no request yet: press 4 and ask something", "$muted"))
            return out
        columns = list(_COLUMNS)
        while len(columns) > 2 and sum(c[1] + 1 for c in columns) > cells:
            columns.pop()
        head = " ".join(pad(title, size, right=right) for title, size, right in columns)
        out.append(Content.styled(head, "$muted"))
        newest = list(reversed(view.requests))
        newest.sort(key=lambda request: request.state not in OPEN_REQUESTS)
        for request in newest[: spare - 1]:
            out.append(self._row(request, [c[0] for c in columns], cells))
        return out

    @staticmethod
    def _row(request: Request, shown: list[str], cells: int) -> Content:
        values = {
            "ID": fit(clean(request.id).removeprefix("chatcmpl-")[-6:], 6),
            "STATE": request.state,
            "PROMPT": units.tokens(request.prompt_tokens) if request.prompt_tokens else "-",
            "OUT": units.tokens(request.output_tokens) if request.output_tokens else "-",
            "TTFT": units.seconds(request.ttft),
            "TOK/S": f"{request.tps:.1f}" if request.tps else "-",
        }
        parts: list[tuple[str, str]] = []
        for title, size, right in _COLUMNS:
            if title in shown:
                style = _STATES[request.state] if title == "STATE" else ""
                parts.append((pad(values[title], size, right=right) + " ", style))
        left = cells - sum(len(part[0]) for part in parts)
        if request.detail and request.state in ("failed", "refused") and left >= 12:
            parts.append((fit(request.detail, left), "$muted"))
        return Content.assemble(*parts)
