"""Models on this machine, and up to how many tokens each fits."""

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Input

from veloxquant.panel import bindings, units
from veloxquant.panel.ports import ModelItem
from veloxquant.panel.proposal import spec_for
from veloxquant.panel.screens.area import AreaScreen
from veloxquant.panel.state import View
from veloxquant.panel.text import clean
from veloxquant.panel.widgets.table import Column, PickTable, Row
from veloxquant.panel.widgets.words import Words

_COLUMNS = (
    Column("NAME", 24, 0, flex=True),
    Column("PARAMS", 7, 3, right=True),
    Column("QUANT", 6, 4),
    Column("DISK", 7, 2, right=True),
    Column("FITS UP TO", 22, 0),
    Column("USED", 7, 5, right=True),
)
_SORTS = ("FITS UP TO", "NAME", "PARAMS", "DISK", "USED")


def sorted_models(models: tuple[ModelItem, ...], by: str) -> list[ModelItem]:
    """Models that can run first, then by one column, biggest or newest first."""
    keys = {
        "NAME": lambda m: m.name.casefold(),
        "PARAMS": lambda m: -(m.params or 0),
        "DISK": lambda m: -(m.disk or 0),
        "USED": lambda m: m.used_s_ago if m.used_s_ago is not None else float("inf"),
        "FITS UP TO": lambda m: -(m.fits_tokens or 0),
    }
    return sorted(models, key=lambda m: (not m.runnable, keys[by](m)))


def fits_words(model: ModelItem) -> tuple[str, str]:
    """The FITS column: tokens and method, or why not."""
    if not model.runnable:
        return "not runnable", "$state-failed"
    if model.fits_tokens is None:
        return model.fits_note or "not known", "$muted"
    if model.fits_tokens == 0:
        return model.fits_note or "too big here", "$state-warn"
    return f"{units.short_tokens(model.fits_tokens):>5}  {model.fits_method}", "$state-ready"


class ModelsScreen(AreaScreen):
    """The list, a filter, and what is known about the picked one."""

    AREA = "models"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings.of("models")]

    def __init__(self) -> None:
        super().__init__()
        self.sort = _SORTS[0]
        self._drawn: tuple[object, ...] = ()

    def body(self) -> ComposeResult:
        """Filter line, table, details."""
        with Horizontal(id="models-line", classes="line"):
            yield Words("", id="models-count")
            yield Input(placeholder="/ filter by name", id="models-filter")
        with Horizontal(id="models-body"):
            yield PickTable(_COLUMNS, id="models-table")
            detail = Words("", id="models-detail", classes="pane")
            detail.border_title = Content("MODEL")
            yield detail

    def on_mount(self) -> None:
        """The table has the focus."""
        super().on_mount()
        self.query_one(PickTable).focus()

    def show(self, view: View, now: float) -> None:
        """Rebuild the rows when the models changed."""
        super().show(view, now)
        needle = self.query_one(Input).value
        state = (
            self.panel.models,
            needle,
            self.sort,
            self.panel.fetching,
            view.spec,
            view.server.phase,
        )
        if state == self._drawn:
            return
        self._drawn = state
        self._rows(view, needle)
        self._detail()
        self.refresh_bindings()

    def _rows(self, view: View, needle: str) -> None:
        table = self.query_one(PickTable)
        models = self.panel.models
        loaded = view.spec.model if view.spec and view.is_running else ""
        found = [
            model
            for model in sorted_models(models or (), self.sort)
            if needle.casefold() in model.name.casefold()
        ]
        rows = []
        for model in found:
            fits, style = fits_words(model)
            rows.append(
                Row(
                    model.path,
                    (
                        (clean(model.name, 120), "bold" if model.path == loaded else ""),
                        (units.params(model.params), ""),
                        (clean(model.quant, 10), "$muted"),
                        (units.short_size(model.disk), ""),
                        (clean(fits, 60), style),
                        ("loaded", "$state-ready")
                        if model.path == loaded
                        else (units.ago(model.used_s_ago), "$muted"),
                    ),
                    enabled=model.runnable,
                    mark="!" if not model.runnable else "",
                )
            )
        table.sorted_by = self.sort
        table.set_rows(rows)
        if models is None:
            table.set_empty("\nlooking for models ...")
        elif not models:
            table.set_empty(
                "\nNo MLX model on this machine yet.\n\n"
                "d   fetch the small demo model (SmolLM2 135M, about 270 MB)\n"
                "r   look again, after you put one into the Hugging Face cache"
            )
        else:
            table.set_empty("\nno model matches the filter; esc clears it")
        count = f"{len(found)} of {len(models or ())}" if needle else f"{len(models or ())}"
        self.query_one("#models-count", Words).update(Content(f"Local models ({count})"))

    @property
    def picked(self) -> ModelItem | None:
        """The model under the cursor."""
        key = self.query_one(PickTable).key
        return next((model for model in self.panel.models or () if model.path == key), None)

    def _detail(self) -> None:
        target = self.query_one("#models-detail", Words)
        if self.panel.fetching is not None:
            target.update(self.panel.fetching.content())
            return
        model = self.picked
        if model is None:
            target.update(Content(""))
            return
        parts: list[tuple[str, str]] = [(clean(model.name, 120), "bold")]
        if model.why_not:
            parts.append((f"\n{clean(model.why_not, 300)}", "$state-warn"))
        for name, value in model.facts:
            parts += [(f"\n{name:<10}", "$muted"), (clean(value, 400), "")]
        memory = self.panel.memory
        if memory is not None and memory.note:
            parts += [("\nroom now  ", "$muted"), (clean(memory.note, 300), "")]
        target.update(Content.assemble(*parts))

    # ---- events and actions -----------------------------------------------------------------

    @on(PickTable.Moved, "#models-table")
    def _moved(self) -> None:
        self._detail()

    @on(PickTable.Picked, "#models-table")
    def _picked(self) -> None:
        self.action_fit()

    @on(Input.Changed, "#models-filter")
    def _filtered(self) -> None:
        self.show(self.panel.view, self.panel.clock())

    @on(Input.Submitted, "#models-filter")
    def _filter_done(self) -> None:
        self.query_one(PickTable).focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Keys that would do nothing now are not shown."""
        if action == "demo":
            return self.panel.fetching is None and not self.panel.has_demo
        if action in ("fit", "start", "copy"):
            return bool(self.panel.models)
        return True

    def action_fit(self) -> None:
        """Show the method table of the picked model."""
        if (model := self.picked) is not None:
            self.panel.pick_model(model)

    def action_start(self) -> None:
        """Start the picked model at once."""
        model = self.picked
        if model is None:
            return
        if not model.runnable:
            self.notify(
                clean(model.why_not, 200) or "this model cannot run",
                severity="warning",
                markup=False,
            )
            return
        self.panel.start(spec_for(model, template=self.panel.template))

    def action_filter(self) -> None:
        """Type into the filter."""
        self.query_one(Input).focus()

    def action_clear(self) -> None:
        """Empty the filter and go back to the table."""
        self.query_one(Input).value = ""
        self.query_one(PickTable).focus()

    def action_sort(self) -> None:
        """Sort by the next column."""
        self.sort = _SORTS[(_SORTS.index(self.sort) + 1) % len(_SORTS)]
        self.show(self.panel.view, self.panel.clock())

    def action_demo(self) -> None:
        """Fetch the demo model."""
        self.panel.fetch_demo()

    def action_rescan(self) -> None:
        """Look again."""
        self.panel.look_around()

    def action_copy(self) -> None:
        """Copy the folder."""
        if (model := self.picked) is not None:
            self.panel.copy(model.path, "the model's folder")
