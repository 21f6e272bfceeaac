"""The server: starting, running, or why it does not run and what can be done."""

import time
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from veloxquant.panel import bindings, units
from veloxquant.panel.report import report_of
from veloxquant.panel.screens.area import AreaScreen
from veloxquant.panel.state import View, freshness, model_name
from veloxquant.panel.steps import Step, next_steps
from veloxquant.panel.text import clean
from veloxquant.panel.theme import GLYPHS
from veloxquant.panel.widgets.clock import wall_clock
from veloxquant.panel.widgets.gauge import MemoryPane
from veloxquant.panel.widgets.layers import LayerPane
from veloxquant.panel.widgets.log_pane import LogPane
from veloxquant.panel.widgets.pool_map import PoolPane
from veloxquant.panel.widgets.speed import RequestPane, SpeedPane
from veloxquant.panel.widgets.stages import StagesPane
from veloxquant.panel.widgets.words import Words

_SOMETIMES = ("stop", "pause", "copy_url", "choose", "next_port", "report", "demo")


def page_of(view: View) -> str:
    """Which page the area shows: idle, starting, live or failed."""
    if view.fault is not None and not view.is_running:
        return "failed"
    if view.server.phase in ("starting", "loading"):
        return "starting"
    return "live" if view.is_running else "idle"


class RunScreen(AreaScreen):
    """One page a state of the server."""

    AREA = "run"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings.of("run")]

    def __init__(self) -> None:
        super().__init__()
        self.paused: View | None = None
        self.steps: list[Step] = []
        self._shown_fault: object = None
        self._possible: tuple[bool | None, ...] = ()

    def body(self) -> ComposeResult:
        """All pages; one is displayed."""
        yield Words("", id="run-line", classes="line")
        yield Words("", id="run-warning")
        with Vertical(id="page-idle", classes="page"):
            yield Words("", id="idle-text")
        with Vertical(id="page-starting", classes="page"):
            yield StagesPane()
            yield LogPane()
        with Vertical(id="page-live", classes="page"):
            with Horizontal(id="live-top"):
                yield MemoryPane()
                yield SpeedPane()
                yield RequestPane()
            yield PoolPane()
            with Horizontal(id="live-bottom"):
                yield LayerPane()
                yield LogPane()
        with Vertical(id="page-failed", classes="page"):
            why = Words("", id="failed-why", classes="pane")
            why.border_title = Content("WHAT HAPPENED")
            yield why
            steps = OptionList(id="failed-steps", classes="pane")
            steps.border_title = Content("WHAT YOU CAN DO")
            yield steps
            yield LogPane()

    def show(self, view: View, now: float) -> None:
        """Show the page of the state; a paused view keeps its values."""
        if self.paused is not None and (page_of(view) != "live" or view.epoch != self.paused.epoch):
            self.paused = None
        super().show(self.paused or view, now)
        page = page_of(view)
        for name in ("idle", "starting", "live", "failed"):
            self.query_one(f"#page-{name}").display = name == page
        self.query_one("#run-line", Words).update(self._line(view, now))
        warnings = view.server.warnings if view.is_running else []
        warning = self.query_one("#run-warning", Words)
        warning.display = bool(warnings)
        if warnings:
            more = f"  ({len(warnings) - 1} more in the log)" if len(warnings) > 1 else ""
            warning.update(Content(f"{GLYPHS.warn} {clean(warnings[0], 300)}{more}"))
        if page == "failed":
            self._failure(view)
        else:
            self._shown_fault = None
        if page == "idle":
            self.query_one("#idle-text", Words).update(self._idle(view))
        possible = tuple(self.check_action(name, ()) for name in _SOMETIMES)
        if possible != self._possible:
            self._possible = possible
            self.refresh_bindings()

    # ---- pages ------------------------------------------------------------------------------

    def _line(self, view: View, now: float) -> Content:
        server, parts = view.server, list[tuple[str, str]]()
        if view.link == "lost":
            return Content.styled(
                f"connection to the supervisor lost: {view.link_note or 'connecting again'}",
                "$state-warn",
            )
        if self.paused is not None:
            parts.append(("PAUSED (space goes on)   ", "bold $state-warn"))
        late = freshness(view, now)
        if late != "fresh":
            silent = now - view.heard_at
            parts.append(
                (
                    f"no news from the worker for {silent:.0f} s: values are old   ",
                    "bold $state-warn",
                )
            )
        if self.has_class("-short") and page_of(view) == "live":
            parts.append(("+2 panes (taller)   ", "$state-warn"))
        if view.is_serving:
            up = now - (view.phase_at if server.ready_at is None else server.ready_at)
            parts += [
                ("up ", "$muted"),
                (units.clock(up), ""),
                ("   pid ", "$muted"),
                (str(server.pid or "-"), ""),
                ("   restarts ", "$muted"),
                (str(server.restarts), "$state-warn" if server.restarts else ""),
                ("   ", ""),
                (view.base_url, "bold"),
                ("  y copies", "$muted"),
            ]
        elif server.phase in ("starting", "loading") and view.spec is not None:
            parts += [
                ("context ", "$muted"),
                (f"{view.spec.context:,}", ""),
                ("   batch ", "$muted"),
                (str(view.spec.batch), ""),
                ("   port ", "$muted"),
                (str(server.port or view.spec.port), ""),
            ]
        elif server.phase == "stopping":
            parts.append(("finishing running answers, then the process ends", "$muted"))
        elif server.phase in ("crashed", "backoff") and server.retry_in is not None:
            parts.append((f"starting again in {server.retry_in:.0f} s", "$state-warn"))
        return Content.assemble(*parts)

    def _idle(self, view: View) -> Content:
        if view.link == "refused":
            return Content.assemble(
                ("The panel is not connected to a supervisor.\n", "bold $state-warn"),
                (f"{clean(view.link_note, 300)}\n\nTrying again by itself.", "$muted"),
            )
        if view.link == "connecting":
            return Content.styled("connecting to the supervisor ...", "$muted")
        found = self.panel.proposal
        last = view.spec or view.lost_spec
        parts: list[tuple[str, str]] = [("No server is running.\n\n", "bold")]
        if view.lost_spec is not None:
            at = wall_clock(time.time() - (self.panel.clock() - view.lost_at))[:5]
            said = f"The server was lost when its supervisor ended at {at}; r starts it again.\n\n"
            parts = [(said, "bold $state-warn")]
        if last is not None:
            name = model_name(last.name or last.model)
            parts += [
                ("r ", "bold $primary"),
                (f"start again: {name} with {clean(last.method, 40)}\n", ""),
            ]
        elif found is not None:
            parts += [
                ("r ", "bold $primary"),
                (f"start {clean(found.model.name, 60)} with {clean(found.spec.method, 40)}\n", ""),
            ]
        parts += [
            ("1 ", "bold $primary"),
            ("pick a model\n", ""),
            ("2 ", "bold $primary"),
            ("see what fits\n", ""),
        ]
        return Content.assemble(*parts)

    def _failure(self, view: View) -> None:
        fault = view.fault
        if fault is None or fault is self._shown_fault:
            return
        self._shown_fault = fault
        parts: list[tuple[str, str]] = [(clean(fault.message, 400), "bold $state-failed")]
        if fault.detail:
            parts.append((f"\n{clean(fault.detail, 600)}", ""))
        if fault.hint:
            parts.append((f"\n{clean(fault.hint, 400)}", "$muted"))
        spec = view.refused_spec or view.spec
        if spec is not None:
            asked = f"{clean(spec.model, 200)}, {clean(spec.method, 40)}, {spec.context:,} tokens"
            parts.append((f"\nasked for: {asked}, port {spec.port}", "$muted"))
        self.query_one("#failed-why", Words).update(Content.assemble(*parts))
        self.steps = next_steps(fault, spec)
        steps = self.query_one("#failed-steps", OptionList)
        steps.set_options(
            Option(
                Content.assemble((f" {step.key or ' '} ", "bold $primary"), f" {clean(step.text)}")
            )
            for step in self.steps
        )
        steps.highlighted = 0
        steps.focus()

    # ---- actions ----------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Keys that would do nothing now are not shown."""
        view = self.panel.view
        page = page_of(view)
        table = {
            "stop": view.is_running or view.server.phase == "backoff",
            "pause": page == "live",
            "copy_url": view.is_serving,
            "choose": page == "failed",
            "next_port": page == "failed"
            and view.fault is not None
            and view.fault.code == "port_taken",
            "report": page == "failed",
            "demo": page == "failed" and not self.panel.has_demo,
        }
        return table.get(action, True)

    @on(OptionList.OptionSelected, "#failed-steps")
    def _step_chosen(self, event: OptionList.OptionSelected) -> None:
        self._do(self.steps[event.option_index])

    def action_choose(self) -> None:
        """Do the highlighted step."""
        at = self.query_one("#failed-steps", OptionList).highlighted
        if at is not None and at < len(self.steps):
            self._do(self.steps[at])

    def _do(self, step: Step) -> None:
        if step.action == "again" and step.spec is not None:
            self.panel.start(step.spec)
        else:
            self.call_later(self.run_action, step.action)

    def action_stop(self) -> None:
        """Stop the server; running answers get some seconds."""
        self.panel.ask_stop()

    def action_restart(self) -> None:
        """The same again, running or not."""
        view = self.panel.view
        if view.is_running:
            self.panel.restart()
            return
        spec = view.refused_spec or view.spec or view.lost_spec
        if spec is None and self.panel.proposal is not None:
            spec = self.panel.proposal.spec
        if spec is not None:
            self.panel.start(spec)

    def action_next_port(self) -> None:
        """Start on the next free port."""
        view = self.panel.view
        if (spec := view.refused_spec or view.spec) is not None:
            self.panel.start_on_next_port(spec)

    def action_copy_url(self) -> None:
        """Copy the address."""
        self.panel.copy(self.panel.view.base_url, "the address")

    def action_pause(self) -> None:
        """Freeze or go on."""
        self.paused = None if self.paused is not None else self.panel.view
        self.show(self.panel.view, self.panel.clock())

    def action_logs(self) -> None:
        """All logs."""
        self.panel.action_go("logs")

    def action_other_model(self) -> None:
        """Pick another model."""
        self.panel.action_go("models")

    def action_other_method(self) -> None:
        """Pick another method for the same model."""
        self.panel.pick_path(self.panel.view.spec or self.panel.view.refused_spec)

    def action_demo(self) -> None:
        """Fetch the demo model; the models show how far it is."""
        self.panel.fetch_demo()
        self.panel.action_go("models")

    def action_report(self) -> None:
        """Copy what went wrong, without paths."""
        self.panel.copy(report_of(self.panel.view), "the report")
