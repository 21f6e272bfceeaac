"""All log lines: filter, level, follow, pause, wrap, copy, export."""

from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Input

from veloxquant.panel import bindings
from veloxquant.panel.screens.area import AreaScreen
from veloxquant.panel.state import View
from veloxquant.panel.widgets.clock import wall_clock
from veloxquant.panel.widgets.line_log import LEVELS, LineLog
from veloxquant.panel.widgets.words import Words


class LogsScreen(AreaScreen):
    """The log as the supervisor keeps it, newest at the bottom."""

    AREA = "logs"
    # not the filter, which comes first: it would take keys that were meant for the panel
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [*bindings.of("logs")]

    def body(self) -> ComposeResult:
        """Filter line, lines, and the line that is picked in full."""
        with Horizontal(id="logs-line", classes="line"):
            yield Words("", id="logs-facts")
            yield Input(placeholder="/ filter", id="logs-filter")
        yield LineLog(id="logs-lines")
        yield Words("", id="logs-below", classes="line")
        detail = Words("", id="logs-detail", classes="pane")
        detail.border_title = Content("LINE")
        yield detail

    def on_mount(self) -> None:
        """The lines have the focus."""
        super().on_mount()
        log = self.query_one(LineLog)
        wanted = next((s.value for s in self.panel.settings if s.key == "logs.level"), log.level)
        log.level = wanted if wanted in LEVELS else log.level
        log.focus()

    def show(self, view: View, now: float) -> None:
        """Take new lines."""
        super().show(view, now)
        self.query_one(LineLog).set_lines(view.logs)
        self._facts()

    @on(LineLog.Changed)
    def _facts(self) -> None:
        log = self.query_one(LineLog)
        parts: list[tuple[str, str]] = [
            (f"level {log.level}+", "bold"),
            (f"   {len(log.shown):,} of {log.total:,} lines", "$muted"),
            ("   ", ""),
            ("follow", "$state-ready") if log.following else ("PAUSED", "bold $state-warn"),
            ("   wrap" if log.wrap else "", "$muted"),
        ]
        self.query_one("#logs-facts", Words).update(Content.assemble(*parts))
        below = self.query_one("#logs-below", Words)
        below.display = not log.following
        below.update(
            Content.styled(f"paused: {log.below:,} new lines below (G follows)", "$state-warn")
        )
        picked = log.picked
        detail = self.query_one("#logs-detail", Words)
        detail.display = not log.following and picked is not None
        if picked is not None:
            request = f"   request {picked.request}" if picked.request else ""
            detail.update(
                Content.assemble(
                    (f"{wall_clock(picked.wall, millis=True)}   {picked.level}   ", "$muted"),
                    (f"{picked.source}{request}\n", "$muted"),
                    picked.text,
                )
            )  # fmt: skip

    @on(Input.Changed, "#logs-filter")
    def _filtered(self, event: Input.Changed) -> None:
        self.query_one(LineLog).needle = event.value

    @on(Input.Submitted, "#logs-filter")
    def _filter_done(self) -> None:
        self.query_one(LineLog).focus()

    # ---- actions ----------------------------------------------------------------------------

    def action_filter(self) -> None:
        """Type into the filter; the last text is still there."""
        self.query_one(Input).focus()

    def action_clear(self) -> None:
        """Empty the filter and go back to the lines."""
        self.query_one(Input).value = ""
        self.query_one(LineLog).focus()

    def action_level(self) -> None:
        """The next lowest level."""
        log = self.query_one(LineLog)
        log.level = LEVELS[(LEVELS.index(log.level) + 1) % len(LEVELS)]

    def action_follow(self) -> None:
        """Follow the newest line."""
        self.query_one(LineLog).following = True

    def action_pause(self) -> None:
        """Pause, or follow again."""
        log = self.query_one(LineLog)
        log.following = not log.following

    def action_wrap(self) -> None:
        """Wrap or cut long lines."""
        log = self.query_one(LineLog)
        log.wrap = not log.wrap
        self._facts()

    def action_top(self) -> None:
        """The oldest line."""
        log = self.query_one(LineLog)
        log.move(-len(log.shown))

    def action_copy(self) -> None:
        """Copy the line under the cursor."""
        if (line := self.query_one(LineLog).picked) is not None:
            text = f"{wall_clock(line.wall, millis=True)} {line.level} {line.source} {line.text}"
            self.panel.copy(text, "the line")

    def action_export(self) -> None:
        """Write what is shown to a file, without folders and tokens."""
        lines = list(self.query_one(LineLog).shown)
        if not lines:
            self.notify("no line is shown: nothing was written", severity="warning", markup=False)
            return
        self.run_worker(lambda: self._export(lines), thread=True, exit_on_error=False)

    def _export(self, lines: list) -> None:
        from veloxquant.panel.export import export_lines

        try:
            path: Path = export_lines(lines)
        except OSError as error:
            self.app.call_from_thread(
                self.notify, f"the lines could not be written: {error.strerror}",
                severity="error", markup=False,
            )  # fmt: skip
            return
        self.app.call_from_thread(
            self.notify, f"{len(lines):,} lines written to {path}", timeout=10, markup=False
        )
