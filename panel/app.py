"""The app: areas, the connection, what is known, and the few acts that change the server.

First paint comes first: the control client (aiohttp) and the library (planning) are imported in
threads after it, and the model library never.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from textual.app import App
from textual.binding import BindingType
from textual.content import Content
from textual.reactive import reactive
from textual.screen import Screen

from veloxquant.panel import bindings, theme
from veloxquant.panel.bindings import AREAS
from veloxquant.panel.commands import ActionProvider
from veloxquant.panel.farewell import heed
from veloxquant.panel.operate import Operate
from veloxquant.panel.palette import Palette
from veloxquant.panel.ports import Control, Library
from veloxquant.panel.scout import Scout
from veloxquant.panel.screens.area import AreaScreen
from veloxquant.panel.screens.first_look import FirstLook
from veloxquant.panel.state import LinkNews, View, fold
from veloxquant.panel.text import clean

TICK = 0.5
MEMORY_TICKS = 10
# news is drawn at most this often, whatever the flood
FLUSH = 0.1


def _models() -> Screen[Any]:
    from veloxquant.panel.screens.models import ModelsScreen

    return ModelsScreen()


def _fit() -> Screen[Any]:
    from veloxquant.panel.screens.fit import FitScreen

    return FitScreen()


def _run() -> Screen[Any]:
    from veloxquant.panel.screens.run import RunScreen

    return RunScreen()


def _chat() -> Screen[Any]:
    from veloxquant.panel.screens.chat import ChatScreen

    return ChatScreen()


def _logs() -> Screen[Any]:
    from veloxquant.panel.screens.logs import LogsScreen

    return LogsScreen()


def _profile() -> Screen[Any]:
    from veloxquant.panel.screens.profile import ProfileScreen

    return ProfileScreen()


def _settings() -> Screen[Any]:
    from veloxquant.panel.screens.settings import SettingsScreen

    return SettingsScreen()


class PanelApp(Operate, Scout, App[int]):
    """Draws one immutable `view`; screens are told when it or the local knowledge changes."""

    TITLE = "VeloxQuant"
    # all at once: a sheet added later makes Textual parse every sheet again
    CSS_PATH = [  # noqa: RUF012 - as Textual declares it
        f"screens/{name}.tcss"
        for name in ("base", "first_look", "models", "fit", "run", "chat", "logs", "profile")
    ]
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[Any]] = {ActionProvider}
    BINDINGS: ClassVar[list[BindingType]] = [*bindings.of("app")]
    MODES: ClassVar[dict[str, Any]] = {
        "first": FirstLook,
        "models": _models,
        "fit": _fit,
        "run": _run,
        "chat": _chat,
        "logs": _logs,
        "profile": _profile,
        "settings": _settings,
    }
    DEFAULT_MODE = "first"
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012 - as Textual declares it
        (0, "-narrow"),
        (80, "-normal"),
        (110, "-wide"),
        (150, "-huge"),
    ]
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012 - as Textual declares it
        (0, "-short"),
        (23, "-medium"),
        (40, "-tall"),
    ]

    # the screens decide what to draw: a new view alone would draw everything again
    view: reactive[View] = reactive(View, init=False, repaint=False)

    def __init__(
        self,
        make_control: Callable[[], Control] | None = None,
        make_library: Callable[[], Library] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make_control` and `make_library` are called in threads after the first paint."""
        self._theme_wanted = theme.theme_name()
        super().__init__()
        self.clock = clock
        self._make_control = make_control or _real_control
        self._make_library = make_library or _real_library
        self.control: Control | None = None
        self._pending: list[Any] = []
        self._flushing = False
        self._seen_snapshot = False
        self._ticks = 0
        self.linked = asyncio.Event()

    # ---- life -------------------------------------------------------------------------------

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our semantic colours, in the terminal's own palette where the theme is ANSI."""
        return dict(theme.ANSI if self.current_theme.ansi else theme.DARK)

    def on_mount(self) -> None:
        """Nothing here may be slow: the first paint waits for it."""
        self.register_theme(theme.VELOX)
        if self._theme_wanted in self.available_themes:
            self.theme = self._theme_wanted
        self.call_after_refresh(self._begin)
        if not self.is_headless:
            loop = asyncio.get_running_loop()

            def leave() -> None:
                loop.call_soon_threadsafe(self.exit, 0)

            heed(leave)

    def _begin(self) -> None:
        """After the first paint: connect, look around, tick."""
        self.set_interval(TICK, self._tick)
        self.run_worker(self._live(), group="link", exit_on_error=False)
        self.look_around()
        self.open_desk()

    async def _live(self) -> None:
        """Keep the connection; what cannot connect is told and tried again."""
        from veloxquant.panel.ports import CommandFailed

        self.control = await asyncio.to_thread(self._make_control)
        while True:
            try:
                await self.control.connect()
                self.linked.set()
                break
            except CommandFailed as problem:
                note = f"{problem.message} {problem.hint}".strip()
                self.view = replace(self.view, link="refused", link_note=clean(note, 400))
                await asyncio.sleep(3.0)
        async for item in self.control.events():
            self._pending.append(item)
            if not self._flushing:
                self._flushing = True
                if self._seen_snapshot:
                    self.set_timer(FLUSH, self._take_news)
                else:
                    self.call_later(self._take_news)

    def _take_news(self) -> None:
        self._flushing = False
        pending, self._pending = self._pending, []
        self.view = fold(self.view, pending, self.clock())
        if not self._seen_snapshot and self.view.epoch:
            self._seen_snapshot = True
            self._first_news()

    def _first_news(self) -> None:
        """A server that runs already, or ended badly, is what the user wants to see."""
        phase = self.view.server.phase
        if self.current_mode == "first" and phase not in ("stopped",):
            self.action_go("run")

    def _tick(self) -> None:
        self._ticks += 1
        if self._ticks % MEMORY_TICKS == 0:
            self.measure_memory()
        self.poke()

    def watch_view(self) -> None:
        """Tell the screen in front."""
        self.poke()

    def poke(self) -> None:
        """Redraw the area in front; dialogs above it do not depend on the view."""
        for screen in reversed(self.screen_stack):
            if isinstance(screen, AreaScreen):
                if screen.is_mounted and screen.query("TopBar"):
                    screen.show(self.view, self.clock())
                return

    async def on_unmount(self) -> None:
        """Let go of the connection; the server goes on."""
        if self.control is not None:
            await self.control.close()

    def lose_link(self, reason: str) -> None:
        """For the connection: say that it is gone."""
        self.view = fold(self.view, [LinkNews(False, reason)], self.clock())

    # ---- moving around ----------------------------------------------------------------------

    def action_go(self, area: str) -> None:
        """Bring an area to the front."""
        if self.current_mode != area:
            self.switch_mode(area)

    def __getattr__(self, name: str) -> Any:
        """`action_go_<area>` for every area of the table."""
        if name.startswith("action_go_"):
            area = name.removeprefix("action_go_")
            if any(area == known for known, _, _ in AREAS):
                return lambda: self.action_go(area)
        raise AttributeError(name)

    def action_first_look(self) -> None:
        """The first look again."""
        self.action_go("first")

    def action_keys(self) -> None:
        """All keys of the area in front."""
        from veloxquant.panel.screens.dialogs import Help

        if not isinstance(self.screen, Help):
            self.push_screen(Help(self.current_mode))

    def action_command_palette(self) -> None:
        """Open the palette."""
        is_open = any(isinstance(screen, Palette) for screen in self.screen_stack)
        if self.use_command_palette and not is_open:
            self.push_screen(Palette(id="--command-palette"))

    def action_palette(self) -> None:
        """Find an action by name."""
        self.action_command_palette()

    def action_leave(self) -> None:
        """Close the panel; what runs is asked about."""
        from veloxquant.panel.screens.dialogs import Choice

        if isinstance(self.screen, Choice):
            return
        answering = self.chat_is_answering()
        wanted = next((s.value for s in self.settings if s.key == "panel.quit"), "ask")
        if (not self.view.is_running and not answering) or wanted == "keep":
            self.exit(0)
            return
        if wanted == "stop" and not answering:
            self.run_worker(self._stop_and_leave(), group="command", exit_on_error=False)
            return
        lines, answers = [], []
        if self.view.is_running:
            lines.append(
                Content.assemble(
                    (f"{self.view.model_name}", "bold"),
                    (f" is served at {self.view.base_url}", ""),
                )
            )
            answers += [
                ("keep", "k", "keep the server running"),
                ("stop", "s", "stop the server, then close"),
            ]
        else:
            answers.append(("keep", "k", "close; the answer is finished all the same"))
        if answering:
            lines.append(
                Content.styled(
                    "An answer is being written; it is kept, not a token is lost.", "$muted"
                )
            )
        answers.append(("", "", "back"))

        def take(word: str | None) -> None:
            if word == "keep":
                self.exit(0)
            elif word == "stop":
                self.run_worker(self._stop_and_leave(), group="command", exit_on_error=False)

        self.push_screen(Choice("CLOSE THE PANEL", lines, answers), take)

    async def _stop_and_leave(self) -> None:
        if await self.command("stop", {"grace": 10.0}) is not None:
            self.exit(0)

    def copy(self, value: str, what: str) -> None:
        """Copy through the terminal, and through the system where that exists."""
        from veloxquant.panel.clipboard import copy

        how = copy(self, value)
        self.notify(f"copied {what} ({how})", timeout=3, markup=False)


def _real_control() -> Control:
    from veloxquant.panel.control import SupervisorControl

    return SupervisorControl()


def _real_library() -> Library:
    from veloxquant.panel.library import PlanningLibrary

    return PlanningLibrary()
