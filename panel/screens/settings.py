"""Settings in force and where each comes from; read only, changed with `vq config set`."""

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content

from veloxquant.panel import bindings
from veloxquant.panel.screens.area import AreaScreen
from veloxquant.panel.state import View
from veloxquant.panel.text import clean
from veloxquant.panel.widgets.table import Column, PickTable, Row
from veloxquant.panel.widgets.words import Words

_COLUMNS = (
    Column("SETTING", 20, 0),
    Column("VALUE", 18, 0, flex=True),
    Column("SET BY", 12, 1),
    Column("WHAT IT IS", 46, 2),
)


class SettingsScreen(AreaScreen):
    """One row a setting; the row below says how to change it."""

    AREA = "settings"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings.of("settings")]

    def body(self) -> ComposeResult:
        """Table and how to change."""
        yield PickTable(_COLUMNS, empty="\nreading the settings ...")
        detail = Words("", id="settings-detail", classes="pane")
        detail.border_title = Content("HOW TO CHANGE IT")
        yield detail

    def on_mount(self) -> None:
        """The table has the focus."""
        super().on_mount()
        self.query_one(PickTable).focus()

    def show(self, view: View, now: float) -> None:
        """Redraw the rows."""
        super().show(view, now)
        self.query_one(PickTable).set_rows(
            [
                Row(
                    item.key,
                    (
                        (item.key, "bold"),
                        (clean(item.value, 200), ""),
                        (clean(item.origin, 40), "$muted" if item.origin == "default" else ""),
                        (clean(item.about, 200), "$muted"),
                    ),
                )
                for item in self.panel.settings
            ]
        )
        self._detail()

    @on(PickTable.Moved)
    def _detail(self) -> None:
        key = self.query_one(PickTable).key
        item = next((item for item in self.panel.settings if item.key == key), None)
        if item is None:
            return
        self.query_one("#settings-detail", Words).update(
            Content.assemble(
                (f"{clean(item.about, 200)}\n", ""),
                ("vq config set ", "$muted"), (f"{item.key} VALUE", "bold"),
                ("   or ", "$muted"), (f"{item.variable}=VALUE", "bold"),
                (" in the environment\n", "$muted"),
                (f"file {clean(self.panel.config_path, 300)}   r reads it again", "$muted"),
            )
        )  # fmt: skip

    def action_copy(self) -> None:
        """Copy the path of the file."""
        if self.panel.config_path:
            self.panel.copy(self.panel.config_path, "the path")

    def action_refresh(self) -> None:
        """Read again; the models are looked for again too."""
        self.panel.look_around()
