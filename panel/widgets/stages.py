"""The start-up list: what is done, what runs, what is next."""

from textual.content import Content

from veloxquant.panel import units
from veloxquant.panel.state import View
from veloxquant.panel.text import fit, pad
from veloxquant.panel.theme import GLYPHS
from veloxquant.panel.widgets.pane import Pane
from veloxquant.supervisor.messages import StageReport

NAMES = {
    "process": "worker process",
    "imports": "libraries",
    "weights": "weights",
    "cache": "cache method",
    "canary": "trial token",
    "listen": "listen",
}
_ABOUT = {
    "process": "a process of its own, watched by the supervisor",
    "imports": "mlx and mlx-lm",
    "weights": "read the model into memory",
    "cache": "build the caches of the method",
    "canary": "one token through the real cache, must pass",
    "listen": "open the port",
}
_STATES = {
    "done": (GLYPHS.ok, "$state-ready"),
    "now": (GLYPHS.now, "$state-busy"),
    "next": (GLYPHS.next, "$faint"),
    "warned": (GLYPHS.warn, "$state-warn"),
    "failed": (GLYPHS.fail, "$state-failed"),
}


class StagesPane(Pane):
    """One line a stage; a bar where the amount is known."""

    TITLE = "STARTING"
    LIVE = False

    def lines(self, view: View, cells: int, rows: int) -> list[Content]:  # noqa: ARG002
        """All six stages in order, whatever has been reported so far."""
        told = {stage.stage: stage for stage in view.server.stages}
        running = view.server.phase in ("starting", "loading")
        out = []
        for name in NAMES:
            stage = told.get(name)  # type: ignore[arg-type]
            if stage is None:
                first = running and not told and name == "process"
                stage = StageReport(stage=name, state="now" if first else "next")  # type: ignore[arg-type]
            out.append(self._line(stage, cells))
        return out

    @staticmethod
    def _line(stage: StageReport, cells: int) -> Content:
        mark, style = _STATES[stage.state]
        time = units.seconds(stage.seconds) if stage.seconds is not None else ""
        name = pad(NAMES[stage.stage], 15)
        detail = stage.detail or _ABOUT[stage.stage]
        bar_cells = min(28, cells - 58)
        bar: list[tuple[str, str]] = []
        if stage.state == "now" and stage.total and stage.done is not None:
            if stage.total > 1 << 20:
                detail = units.pair(stage.done, stage.total)
            if bar_cells >= 8:
                full = round(bar_cells * min(1.0, stage.done / stage.total))
                bar = [
                    (GLYPHS.full * full, "$state-busy"),
                    (GLYPHS.empty * (bar_cells - full), "$faint"),
                    ("  ", ""),
                ]
        room = cells - 4 - 7 - 16 - (bar_cells + 2 if bar else 0) - 9
        return Content.assemble(
            (f" {mark} {stage.state:<7}", style),
            (name, "bold" if stage.state == "now" else ""),
            " ",
            *bar,
            (pad(fit(detail, max(6, room)), max(6, room)), "$muted"),
            (f"{time:>8}", "$muted"),
        )
