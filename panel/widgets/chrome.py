"""Top and bottom of every screen: who runs, where you are, what the keys do."""

from textual import events
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from veloxquant.panel import units
from veloxquant.panel.bindings import AREAS, BY_ID, name_of
from veloxquant.panel.ports import Memory
from veloxquant.panel.state import View, freshness
from veloxquant.panel.text import clean, fit, width
from veloxquant.panel.theme import GLYPHS

_WORDS = {
    "stopped": ("no server", "$state-off"),
    "starting": ("STARTING", "$state-busy"),
    "loading": ("LOADING", "$state-busy"),
    "ready": ("READY", "$state-ready"),
    "busy": ("BUSY", "$state-ready"),
    "stopping": ("STOPPING", "$state-warn"),
    "crashed": ("CRASHED", "$state-failed"),
    "backoff": ("RESTARTING", "$state-warn"),
    "failed": ("FAILED", "$state-failed"),
}


def state_words(view: View, now: float) -> tuple[str, str]:
    """The state in one word or sentence, and its colour."""
    if view.link == "lost":
        return "no supervisor" if not view.epoch else "connection lost", "$state-warn"
    if view.link == "refused":
        return "not connected", "$state-failed"
    if view.refused is not None and not view.is_running:
        return "NOT STARTED", "$state-failed"
    if view.lost_spec is not None and view.server.phase == "stopped":
        return "server lost", "$state-warn"
    word, style = _WORDS[view.server.phase]
    if view.server.phase in ("starting", "loading"):
        word = f"{word} {units.clock(now - view.phase_at)}"
    late = freshness(view, now)
    if late == "stale":
        return f"no news for {now - view.heard_at:.0f} s", "$state-warn"
    if late == "silent":
        return f"UNRESPONSIVE {max(0.0, now - view.heard_at):.0f} s", "$state-failed"
    return word, style


class TopBar(Widget):
    """Two lines: model, state and memory; then the areas."""

    DEFAULT_CSS = "TopBar { dock: top; height: 3; width: 1fr; }"

    view: reactive[View] = reactive(View, repaint=False)
    memory: reactive[Memory | None] = reactive(None)
    area: reactive[str] = reactive("")
    now: reactive[float] = reactive(0.0, repaint=False)
    _drawn: Content | None = None

    def __init__(self, area: str) -> None:
        super().__init__()
        self.set_reactive(TopBar.area, area)
        self._spots: list[tuple[int, int, str]] = []

    def render(self) -> Content:
        """Title line, area line, rule."""
        self._drawn = self._content()
        return self._drawn

    def watch_view(self) -> None:
        """Draw again when it says something else."""
        self._renew()

    def watch_now(self) -> None:
        """A clock may run in the title."""
        self._renew()

    def _renew(self) -> None:
        if self._drawn is None or not self._drawn.is_same(self._content()):
            self.refresh()

    def _content(self) -> Content:
        cells = self.size.width
        rule = Content.styled(GLYPHS.rule * cells, "$rule")
        return Content("\n").join([self._title(cells), self._areas(cells), rule])

    def _title(self, cells: int) -> Content:
        word, style = state_words(self.view, self.now)
        state = f"{GLYPHS.dot} {word}"
        right = self._memory(cells)
        shown = self.view.spec is not None and self.view.server.phase != "stopped"
        name = "VeloxQuant"
        if shown and self.view.spec is not None:
            name = f"{self.view.model_name} / {clean(self.view.spec.method, 40)}"
        where = self.view.base_url.removeprefix("http://").removesuffix("/v1")
        room = cells - right.cell_length - 4
        name = fit(name, max(8, room - width(state) - 3))
        parts = [(" " + name, "bold $ink"), ("   ", ""), (state, f"bold {style}")]
        if self.view.is_serving and room > width(name) + width(state) + len(where) + 6:
            parts.append((f"   {where}", "$muted"))
        left = Content.assemble(*parts)
        gap = cells - left.cell_length - right.cell_length - 1
        return left if gap < 1 else left + Content(" " * gap) + right

    def _memory(self, cells: int) -> Content:
        memory = self.memory
        if memory is None or cells < 70:
            return Content("")
        bar = 20 if cells >= 120 else 8
        full = max(1, round(bar * memory.used / memory.total)) if memory.total else 0
        return Content.assemble(
            (f"mem {units.pair(memory.used, memory.total)} ", "$muted"),
            (GLYPHS.full * full, "$mem-weights"),
            (GLYPHS.empty * (bar - full), "$faint"),
        )

    def _areas(self, cells: int) -> Content:
        parts: list[tuple[str, str]] = [(" ", "")]
        at = 1
        self._spots = []
        for area, digit, title in AREAS:
            here = area == self.area
            label = f" {digit} {title} " if cells >= 66 else f"{digit} {title} "
            if here and (self.app.no_color or self.app.current_theme.ansi):
                label = f"[{label.strip()}]"
            parts.append((label, "bold $background on $primary" if here else "$muted"))
            self._spots.append((at, at + len(label), area))
            at += len(label)
        left = Content.assemble(*parts)
        hint = "? keys  ^p palette  ^q quit" if cells >= 120 else "? keys"
        gap = cells - left.cell_length - len(hint) - 1
        return left if gap < 1 else left + Content.styled(" " * gap + hint, "$muted")

    def on_click(self, event: events.Click) -> None:
        """Go to the area that was clicked."""
        if event.y == 1:
            for start, end, area in self._spots:
                if start <= event.x < end:
                    self.app.call_later(self.app.run_action, f"go_{area}")


class KeyBar(Widget):
    """The keys of this screen, as many as fit; help and quit always stay."""

    DEFAULT_CSS = "KeyBar { dock: bottom; height: 1; width: 1fr; }"

    def __init__(self, area: str) -> None:
        super().__init__()
        self.area = area

    def on_mount(self) -> None:
        """Keys come and go with the focus and with what is possible."""
        self.screen.bindings_updated_signal.subscribe(self, lambda _: self.refresh())

    def render(self) -> Content:
        """Keys in the order of their rank."""
        active = self.screen.active_bindings
        found = []
        for key in BY_ID.values():
            if key.area != self.area or not key.show:
                continue
            keys = key.keys.split(",")
            live = next((active[k] for k in keys if k in active), None)
            if live is not None and live.enabled and live.binding.id == key.id:
                found.append(key)
        found.sort(key=lambda key: key.show)
        tail = "? keys  ^q quit "
        room = self.size.width - len(tail) - 2
        parts: list[tuple[str, str]] = [(" ", "")]
        for key in found:
            name = name_of(key.keys)
            need = len(name) + len(key.label) + 3
            if need > room:
                break
            room -= need
            parts += [(f" {name}", "bold $primary"), (f" {key.label} ", "$muted")]
        left = Content.assemble(*parts)
        gap = max(0, self.size.width - left.cell_length - len(tail))
        return left + Content.styled(" " * gap + tail, "$muted")
