"""What fits: every method for one model at one context, and where the memory goes."""

from typing import Any, ClassVar

import msgspec
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content

from veloxquant.config.small_models import options_by_method
from veloxquant.panel import bindings, units
from veloxquant.panel.ports import CommandFailed, FitItem, FitReport
from veloxquant.panel.proposal import spec_for
from veloxquant.panel.screens.area import AreaScreen
from veloxquant.panel.screens.dialogs import AskNumber, AskText
from veloxquant.panel.state import View
from veloxquant.panel.text import clean, fit, hang, settings_words
from veloxquant.panel.widgets.fit_bars import FitBars
from veloxquant.panel.widgets.longest import LongestPane
from veloxquant.panel.widgets.table import Column, PickTable, Row
from veloxquant.panel.widgets.words import Words

_COLUMNS = (
    Column("METHOD", 15, 0),
    Column("BITS", 5, 3, right=True),
    Column("KV", 7, 0, right=True),
    Column("PEAK", 7, 2, right=True),
    Column("MAX CTX", 7, 0, right=True),
    Column("FITS", 4, 1),
    Column("HOW KNOWN", 19, 4, flex=True),
)
_LEAST, _MOST = 1_024, 1 << 20
_BATCHES = (1, 2, 4, 8, 16)


def kv_words(row: FitItem) -> str:
    """KV bytes, as a range where only bounds are known."""
    if row.kv is not None and row.kv_high and row.kv_high != row.kv:
        return f"{units.short_size(row.kv).split()[0]}-{units.short_size(row.kv_high)}"
    return units.short_size(row.kv)


class FitScreen(AreaScreen):
    """The method table; `+` and `-` change the context, enter starts."""

    AREA = "fit"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings.of("fit")]

    def __init__(self) -> None:
        super().__init__()
        self.report: FitReport | None = None
        self.problem: CommandFailed | None = None
        self.context = 8_192
        self.rows_at_once = 1
        self._batch_chosen = False
        self._width = 0
        self.show_planned = False
        self.options: dict[str, dict[str, Any]] = {}
        self._typed: dict[str, dict[str, Any]] = {}
        self._model = ""

    def body(self) -> ComposeResult:
        """Facts, table, bars and what the picked method is."""
        yield Words("", id="fit-line", classes="line")
        with Horizontal(id="fit-body"):
            with Vertical(id="fit-left"):
                yield PickTable(_COLUMNS, empty="\nno model chosen yet: press 1", id="fit-table")
                yield Words("", id="fit-more", classes="line muted")
                yield LongestPane()
            with Vertical(id="fit-right"):
                yield FitBars(id="fit-bars")
                about = Words("", id="fit-about", classes="pane")
                about.border_title = Content("METHOD")
                yield about

    def on_mount(self) -> None:
        """The table has the focus."""
        super().on_mount()
        self.query_one(PickTable).focus()

    def shown(self) -> None:
        """A newly picked model loads its table."""
        self._check_model()

    def _check_model(self) -> None:
        model = self.panel.picked
        if model is not None and model.path != self._model:
            self._model = model.path
            self.context = spec_for(model, template=self.panel.template).context
            self.report = None
            found = self.panel.proposal
            self.options = options_by_method(model.params) | self._typed
            if found is not None and found.spec.model == model.path and found.spec.options:
                self.options[found.spec.method] = found.spec.options
            self.load()

    def show(self, view: View, now: float) -> None:
        """The table does not depend on the view; only the bars above do."""
        super().show(view, now)
        if not self.panel.picked and self.panel.proposal is not None:
            self.panel.picked = self.panel.proposal.model
        self._check_model()
        width = self.query_one("#fit-about").size.width
        if width != self._width:
            self._width = width
            self._line()
            self._about()

    def load(self) -> None:
        """Compute the table in a thread."""
        model = self.panel.picked
        if model is not None:
            self.panel.load_fit(model, self.context, self.rows_at_once, self.options, self._loaded)
        self._draw()

    def _loaded(self, report: FitReport | None, problem: CommandFailed | None) -> None:
        # an answer for a context that was left meanwhile is old
        if report is not None and (report.model.path, report.context, report.batch) != (
            self._model, self.context, self.rows_at_once,
        ):  # fmt: skip
            return
        first = self.report is None
        self.report, self.problem = report, problem
        self._draw(pick=self._best() if first else None)

    def _best(self) -> str | None:
        fitting = [row.method for row in self._ready() if row.fits and row.method != "fp16"]
        wanted = self.panel.picked.fits_method if self.panel.picked else ""
        return wanted if wanted in fitting else next(iter(fitting), None)

    def _ready(self) -> list[FitItem]:
        return [row for row in self.report.rows if row.ready] if self.report else []

    # ---- drawing ----------------------------------------------------------------------------

    def _draw(self, pick: str | None = None) -> None:
        report = self.report
        self._line()
        table = self.query_one(PickTable)
        if report is None:
            message = "\nworking it out ..." if self.panel.picked else "\nno model chosen: press 1"
            if self.problem is not None:
                message = f"\n{clean(self.problem.message)}\n\n{clean(self.problem.hint)}"
            table.set_rows([])
            table.set_empty(message)
        else:
            rows = [self._row(row) for row in self._ready()]
            planned = [row for row in report.rows if not row.ready]
            if self.show_planned:
                rows += [self._planned(row) for row in planned]
            table.set_rows(rows, pick=pick)
            count = len(planned)
            verb = "hides" if self.show_planned else "shows"
            more = f"{count} methods are documented but not built yet: v {verb} them"
            self.query_one("#fit-more", Words).update(Content(more if count else ""))
        self._about()

    def _line(self) -> None:
        model, report = self.panel.picked, self.report
        cells = (self.size.width or 80) - 2
        parts: list[tuple[str, str]] = [
            ("   context ", "$muted"), (f"< {self.context:,} >", "bold $primary"),
            ("   for ", "$muted"), (f"{self.rows_at_once}", "bold"),
            (self._admitted(), "$muted"),
        ]  # fmt: skip
        if report is not None:
            # narrow windows read the room above the bars
            if cells >= 105:
                parts += [("   room ", "$muted"), (units.size(report.room), "bold")]
            if report.native_context and self.context > report.native_context:
                parts.append((f"   above trained {report.native_context:,}", "$state-warn"))
            elif report.native_context:
                parts.append((f"   trained {report.native_context:,}", "$muted"))
        left = cells - sum(len(text) for text, _ in parts)
        name = fit(clean(model.name, 60).split("/")[-1] if model else "no model", max(8, left))
        parts.insert(0, (name, "bold"))
        self.query_one("#fit-line", Words).update(Content.assemble(*parts))

    def _admitted(self) -> str:
        """How many conversations the server takes at once, where the table is for fewer."""
        most = self.panel.template.batch
        if self._batch_chosen or most <= self.rows_at_once:
            return " at once"
        return f"; up to {most} at once"

    def _row(self, row: FitItem) -> Row:
        fits = ("yes", "$state-ready") if row.fits else ("no", "$state-failed")
        mark = "e" if row.kind == "eviction" else ""
        return Row(
            row.method,
            (
                (row.method, "bold" if row.fits else "$muted"),
                ("evict" if mark else f"{row.bits:.1f}" if row.bits else "-", "$muted"),
                (kv_words(row), "$mem-kv" if row.fits else ""),
                (units.short_size(row.peak), ""),
                (units.short_tokens(row.max_context), "bold" if row.fits else ""),
                fits,
                (clean(row.known, 60), "$muted"),
            ),
            enabled=row.fits,
        )

    @staticmethod
    def _planned(row: FitItem) -> Row:
        none = ("-", "")
        why = ("not built yet", "")
        return Row(row.method, ((row.method, ""), none, none, none, none, none, why), False)

    def _about(self) -> None:
        report, key = self.report, self.query_one(PickTable).key
        row = next((r for r in report.rows if r.method == key), None) if report else None
        bars = self.query_one(FitBars)
        longest = self.query_one(LongestPane)
        bars.report = longest.report = report
        bars.picked = longest.picked = key
        about = self.query_one("#fit-about", Words)
        if report is None or row is None:
            about.update(Content(""))
            return
        parts: list[tuple[str, str]] = [(f"{row.method}  ", "bold"), (clean(row.blurb, 200), "")]
        if row.ready and row.kv is not None and (base := self._fp16()):
            parts.append((f"\n{base / max(1, row.kv):.1f}x smaller than uncompressed", "$mem-kv"))
            parts.append((f" at {report.context:,} tokens", "$muted"))
        if options := self.options.get(row.method):
            parts.append((f"\nsettings {clean(settings_words(options), 200)}", "$primary"))
        parts += self._figures(row, report)
        if row.note:
            parts.append((f"\n{clean(row.note, 400)}", "$state-warn" if not row.fits else "$muted"))
        if self.has_class("-wide") or self.has_class("-huge"):
            room = f"room {clean(report.room_note, 300)}"
            parts.append(("\n" + hang(room, about.size.width, 5), "$muted"))
        parts += [(f"\n{clean(note, 300)}", "$muted") for note in report.notes]
        about.update(Content.assemble(*parts))

    def _figures(self, row: FitItem, report: FitReport) -> list[tuple[str, str]]:
        """Figures in words, where the window is tall enough."""
        if not row.ready or row.kv is None or not self.has_class("-tall"):
            return []
        other = max(0, (row.peak or 0) - report.weights - row.kv)
        reach = units.tokens(row.max_context)
        length = f"{report.batch} x {report.context:,} tokens"
        if report.answer and row.kind != "quantization":
            length += f", {report.answer:,} of them an answer"
        held = f"kv {units.size(row.reading)}; " if (row.reading or 0) > row.kv else ""
        facts = (
            ("kind", row.kind),
            ("weights", units.size(report.weights)),
            ("kv", f"at most {units.size(row.kv)} for {length}"),
            ("reading", f"{held}{units.size(other)} more for work on the prompt, and the program"),
            ("peak", f"{units.size(row.peak)} of {units.size(report.room)}"),
            ("longest", f"{reach} tokens, limited by {clean(row.limit, 40) or 'nothing known'}"),
            ("known", clean(row.known, 80)),
        )
        parts: list[tuple[str, str]] = [("\n", "")]
        for name, value in facts:
            parts += [(f"\n{name:<9}", "$muted"), (value, "")]
        return [*parts, ("\n", "")]

    def _fp16(self) -> int | None:
        return next((row.kv for row in self._ready() if row.method == "fp16"), None)

    # ---- events and actions -----------------------------------------------------------------

    @on(PickTable.Moved, "#fit-table")
    def _moved(self) -> None:
        self._about()

    @on(PickTable.Picked, "#fit-table")
    def _chosen(self) -> None:
        self.action_start()

    def _set_context(self, context: int) -> None:
        self.context = max(_LEAST, min(_MOST, context))
        self.load()

    def action_more_context(self) -> None:
        """The next power of two."""
        self._set_context(1 << self.context.bit_length())

    def action_less_context(self) -> None:
        """The power of two below."""
        self._set_context(1 << max(0, (self.context - 1).bit_length() - 1))

    def action_type_context(self) -> None:
        """Ask for a number; it is taken as it is."""
        about = "tokens a conversation may have; k means 1,024"

        def take(number: int | None) -> None:
            if number:
                self._set_context(number)

        self.app.push_screen(AskNumber("CONTEXT", about, self.context), take)

    def action_settings(self) -> None:
        """Ask for settings of the picked method."""
        method, library = self.query_one(PickTable).key, self.panel.library
        if library is None or method not in [row.method for row in self._ready()]:
            return
        legal = library.method_settings(method)
        if not legal:
            self.notify(f"{method} has no settings", markup=False)
            return

        def check(text: str) -> str:
            try:
                library.parse_settings(method, text)
            except CommandFailed as problem:
                return clean(problem.message, 300)
            return ""

        def take(text: str | None) -> None:
            if text is not None:
                self._typed[method] = library.parse_settings(method, text)
                self.options = self.options | self._typed
                self.load()

        about = f"name=value, with blanks between; a number alone is the bits\nnow: {legal}"
        value = settings_words(self.options.get(method, {}))
        self.app.push_screen(AskText(f"SETTINGS OF {method.upper()}", about, value, check), take)

    def action_batch(self) -> None:
        """The next batch size."""
        at = _BATCHES.index(self.rows_at_once) if self.rows_at_once in _BATCHES else -1
        self.rows_at_once = _BATCHES[(at + 1) % len(_BATCHES)]
        self._batch_chosen = True
        self.load()

    def action_why(self) -> None:
        """Show or hide methods that are not built yet."""
        self.show_planned = not self.show_planned
        self._draw()

    def action_refresh(self) -> None:
        """Compute again with the memory that is free now."""
        self.load()

    def action_back(self) -> None:
        """Back to the models."""
        self.panel.action_go("models")

    def action_start(self) -> None:
        """Start with the picked method; asks when it does not fit."""
        report, key = self.report, self.query_one(PickTable).key
        row = next((r for r in report.rows if r.method == key), None) if report else None
        if report is None or row is None:
            return
        if not row.ready:
            self.notify(
                f"{row.method} is documented but not built yet", severity="warning", markup=False
            )
            return
        spec = spec_for(report.model, row.method, self.context, self.panel.template)
        spec = msgspec.structs.replace(spec, options=self.options.get(row.method, {}))
        if self._batch_chosen:
            spec = msgspec.structs.replace(spec, batch=self.rows_at_once)
        if row.fits:
            self.panel.start(spec)
        else:
            self.panel.start_anyway(spec, row, report)
