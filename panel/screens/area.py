"""What all areas share: the bars above and below, and the way the view reaches the panes."""

from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.screen import Screen

from veloxquant.panel.state import View
from veloxquant.panel.widgets.chrome import KeyBar, TopBar
from veloxquant.panel.widgets.pane import Pane

if TYPE_CHECKING:
    from veloxquant.panel.app import PanelApp


class AreaScreen(Screen[None]):
    """One area. Only the screen in front is told about news; others catch up when shown."""

    AREA: ClassVar[str] = ""

    @property
    def panel(self) -> "PanelApp":
        """The app, typed."""
        return cast("PanelApp", self.app)

    def compose(self) -> ComposeResult:
        """Bars around the body."""
        yield TopBar(self.AREA)
        yield from self.body()
        yield KeyBar(self.AREA)

    def body(self) -> ComposeResult:
        """The widgets between the bars."""
        raise NotImplementedError

    def on_mount(self) -> None:
        """Draw what is known already."""
        self.show(self.panel.view, self.panel.clock())

    def on_screen_resume(self) -> None:
        """Catch up with what happened behind."""
        if self.is_mounted:
            self.show(self.panel.view, self.panel.clock())
            self.shown()

    def shown(self) -> None:
        """Called whenever the area comes to the front."""

    def show(self, view: View, now: float) -> None:
        """Hand the view to bars and panes."""
        bar = self.query_one(TopBar)
        bar.memory = self.panel.memory
        bar.view = view
        bar.now = now
        for pane in self.query(Pane):
            pane.view = view
            pane.now = now
