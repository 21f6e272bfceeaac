"""The first look: is this machine ready, and what would be the best start."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.content import Content

from veloxquant.panel import bindings, units
from veloxquant.panel.ports import Check
from veloxquant.panel.screens.area import AreaScreen
from veloxquant.panel.state import View
from veloxquant.panel.text import clean, hang
from veloxquant.panel.theme import GLYPHS
from veloxquant.panel.widgets.words import Words

_MARKS = {
    "ok": (GLYPHS.ok, "$state-ready"),
    "warn": (GLYPHS.warn, "$state-warn"),
    "fail": (GLYPHS.fail, "$state-failed"),
}


def check_lines(checks: list[Check] | None, cells: int = 0) -> Content:
    """A check a line, indented where it needs more, with the next step below the unwell."""
    if checks is None:
        return Content.styled("looking at this machine ...", "$muted")
    lines = []
    for check in checks:
        mark, style = _MARKS[check.status]
        text = hang(clean(check.text), cells - 7, 0).replace("\n", "\n       ")
        lines.append(Content.assemble((f"{mark} ", style), (f"{check.status:<5}", style), text))
        if check.hint and check.status != "ok":
            lines.append(Content.styled(hang(f"       {clean(check.hint)}", cells, 7), "$muted"))
    return Content("\n").join(lines)


class FirstLook(AreaScreen):
    """Shown on start while no server runs; one key starts the proposal."""

    AREA = "first"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings.of("first")]

    def __init__(self) -> None:
        super().__init__()
        self._possible: tuple[bool | None, ...] = ()

    def body(self) -> ComposeResult:
        """Checks above, proposal below."""
        with VerticalScroll(id="first", can_focus=False):
            checks = Words("", id="checks", classes="pane")
            checks.border_title = Content("THIS MACHINE")
            yield checks
            proposal = Words("", id="proposal", classes="pane")
            proposal.border_title = Content("BEST START")
            yield proposal
            yield Words("", id="privacy", classes="line muted")

    def show(self, view: View, now: float) -> None:
        """Redraw from what the app knows."""
        super().show(view, now)
        panel = self.panel
        # a port that a server of ours has is only known as ours once the supervisor answered
        checks = None if view.link == "connecting" else panel.checks
        box = self.query_one("#checks", Words)
        box.update(check_lines(checks, box.size.width))
        self.query_one("#proposal", Words).update(self._proposal())
        took = f" Checks took {panel.checks_took:.1f} s." if panel.checks is not None else ""
        self.query_one("#privacy", Words).update(
            Content(f"Nothing was sent anywhere.{took} r or vq doctor: again")
        )
        possible = (self.check_action("start", ()), self.check_action("demo", ()))
        if possible != self._possible:
            self._possible = possible
            self.refresh_bindings()

    def _proposal(self) -> Content:
        panel = self.panel
        if panel.fetching is not None:
            return panel.fetching.content()
        if panel.view.link == "connecting":
            return Content.styled("looking for a running server ...", "$muted")
        if panel.models is None:
            return Content.styled("looking for models ...", "$muted")
        found = panel.proposal
        if found is None:
            return Content.assemble(
                ("No model on this machine yet.\n", "bold"),
                ("d fetches the small demo model (SmolLM2 135M): ", "$muted"),
                ("enough to try everything.\np shows the list of models.", "$muted"),
            )
        spec, model = found.spec, found.model
        fits = "not known" if model.fits_tokens is None else units.tokens(model.fits_tokens)
        rows = (
            ("model", f"{clean(model.name, 60)}  ({units.params(model.params)}, {model.quant})"),
            ("method", clean(spec.method, 40)),
            ("context", f"{spec.context:,} tokens; fits up to {fits} here"),
            ("why", found.why),
        )
        parts: list[tuple[str, str]] = []
        for name, value in rows:
            parts += [(f"{name:<9}", "$muted"), (f"{value}\n", "bold" if name != "why" else "")]
        return Content.assemble(
            *parts,
            ("\n", ""),
            (" enter ", "bold $background on $primary"),
            (" start it     ", "bold"),
            (" p ", "bold $primary"),
            ("pick another", ""),
        )

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Keys that would do nothing now are not shown."""
        panel = self.panel
        if action == "start":
            known = panel.view.link != "connecting"
            return known and panel.proposal is not None and panel.fetching is None
        if action == "demo":
            return panel.models is not None and not panel.models and panel.fetching is None
        return True

    def action_start(self) -> None:
        """Start the proposal."""
        if self.panel.proposal is not None:
            self.panel.start(self.panel.proposal.spec)

    def action_pick(self) -> None:
        """Go to the models."""
        self.panel.action_go("models")

    def action_skip(self) -> None:
        """Go to the models."""
        self.panel.action_go("models")

    def action_demo(self) -> None:
        """Fetch the demo model."""
        self.panel.fetch_demo()

    def action_again(self) -> None:
        """Check again."""
        self.panel.look_around()
