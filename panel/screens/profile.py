"""Bytes by layer: what each layer holds, in which form, against uncompressed."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content

from veloxquant.panel import bindings, units
from veloxquant.panel.screens.area import AreaScreen
from veloxquant.panel.state import View
from veloxquant.panel.text import clean
from veloxquant.panel.theme import GLYPHS
from veloxquant.panel.widgets.layers import format_words
from veloxquant.panel.widgets.table import Column, PickTable, Row
from veloxquant.panel.widgets.words import Words
from veloxquant.supervisor.messages import LayerRow, Profile

_BAR = 24
_COLUMNS = (
    Column("LAYER", 5, 0, right=True),
    Column("KIND", 10, 3),
    Column("FORMAT", 16, 1),
    Column("TOKENS", 9, 4, right=True),
    Column("PLAIN", 8, 2, right=True),
    Column("HELD", 8, 0, right=True),
    Column("RATIO", 6, 0, right=True),
    Column("", _BAR, 5, flex=True),
)
_SORTS = ("LAYER", "HELD", "RATIO")


def sorted_layers(layers: list[LayerRow], by: str) -> list[LayerRow]:
    """Layers in order, biggest first, or least compressed first."""
    keys = {
        "LAYER": lambda row: row.index,
        "HELD": lambda row: -row.resident,
        "RATIO": lambda row: row.fp16 / max(1, row.resident),
    }
    return sorted(layers, key=keys[by])


class ProfileScreen(AreaScreen):
    """The table of the newest profile event."""

    AREA = "profile"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings.of("profile")]

    def __init__(self) -> None:
        super().__init__()
        self.sort = _SORTS[0]

    def body(self) -> ComposeResult:
        """Totals, table."""
        yield Words("", id="profile-line", classes="line")
        yield PickTable(_COLUMNS, empty="\nBytes by layer are shown while requests run.")

    def on_mount(self) -> None:
        """The table has the focus."""
        super().on_mount()
        self.query_one(PickTable).focus()

    def show(self, view: View, now: float) -> None:
        """Redraw the table; the cursor stays on its layer."""
        super().show(view, now)
        profile = view.profile
        self.query_one("#profile-line", Words).update(self._line(profile))
        layers = sorted_layers(profile.layers, self.sort) if profile else []
        widest = max((max(row.fp16, row.resident) for row in layers), default=1)
        table = self.query_one(PickTable)
        table.sorted_by = self.sort
        table.set_rows([self._row(row, widest) for row in layers])

    @staticmethod
    def _line(profile: Profile | None) -> Content:
        if profile is None or not profile.layers:
            return Content.styled("no profile yet", "$muted")
        fp16 = sum(row.fp16 for row in profile.layers)
        held = sum(row.resident for row in profile.layers)
        return Content.assemble(
            (f"{len(profile.layers)} layers", "bold"),
            (f"   {profile.tokens:,} tokens   uncompressed ", "$muted"), (units.size(fp16), ""),
            ("   held ", "$muted"), (units.size(held), "bold $mem-kv"),
            (f"   {fp16 / held:.1f}x smaller" if held else "", "$mem-kv"),
        )  # fmt: skip

    @staticmethod
    def _row(row: LayerRow, widest: int) -> Row:
        held = round(_BAR * row.resident / max(1, widest))
        return Row(
            str(row.index),
            (
                (str(row.index), ""),
                (clean(row.kind, 10), "$muted"),
                (clean(format_words(row), 16), ""),
                (f"{row.rows:,}" if row.rows else "-", "$muted"),
                (units.short_size(row.fp16), "$muted"),
                (units.short_size(row.resident), "bold"),
                (f"{row.fp16 / row.resident:.1f}x" if row.resident else "-", ""),
                (GLYPHS.kv * held, "$mem-kv"),
            ),
        )

    def action_sort(self) -> None:
        """Sort by the next column."""
        self.sort = _SORTS[(_SORTS.index(self.sort) + 1) % len(_SORTS)]
        self.show(self.panel.view, self.panel.clock())

    def action_export(self) -> None:
        """Write the table as CSV."""
        profile = self.panel.view.profile
        if profile is not None:
            self.run_worker(lambda: self._export(profile), thread=True, exit_on_error=False)

    def _export(self, profile: Profile) -> None:
        from veloxquant.panel.export import export_layers

        try:
            said = f"{len(profile.layers)} layers written to {export_layers(profile.layers)}"
        except OSError as error:
            said = f"the table could not be written: {error.strerror}"
        self.app.call_from_thread(self.notify, said, timeout=10, markup=False)
