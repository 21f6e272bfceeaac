"""Starting, stopping and restarting, as the app does it; refusals become a state, not a toast."""

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from textual.content import Content

from veloxquant.panel import units
from veloxquant.panel.ports import CommandFailed, Control, FitItem, FitReport, Library
from veloxquant.panel.state import View
from veloxquant.panel.text import clean
from veloxquant.supervisor.messages import Fault, LaunchSpec

if TYPE_CHECKING:
    from textual.app import App

    from veloxquant.panel.chat_desk import ChatDesk

    _Base = App[int]
else:
    _Base = object

GRACE = 10.0
CONNECT_WAIT = 15.0


class Operate(_Base):
    """Mixed into the app."""

    control: Control | None
    view: Any
    library: Library | None
    linked: asyncio.Event
    desk: "ChatDesk | None" = None

    def start(self, spec: LaunchSpec) -> None:
        """Start, or ask first when another server runs; the Run area comes to the front."""
        view: View = self.view
        if view.is_running and view.spec is not None:
            self._ask_replace(view, spec)
            return
        self._go(self._start(spec))

    def _ask_replace(self, view: View, spec: LaunchSpec) -> None:
        from veloxquant.panel.screens.dialogs import Choice

        running = view.stats.running if view.stats else 0
        lines = [
            Content.assemble(
                (view.model_name, "bold"),
                (f" runs with {clean(view.spec.method if view.spec else '', 40)}", ""),
            ),
            Content.styled(
                f"{running} running answers get up to {GRACE:.0f} s to finish"
                if running
                else "no request is running",
                "$muted",
            ),
        ]
        answers = [("replace", "s", "stop it and start the new one"), ("", "", "keep it")]

        def take(word: str | None) -> None:
            if word == "replace":
                self._go(self._replace(spec))

        self.push_screen(Choice("A SERVER IS RUNNING", lines, answers), take)

    def start_anyway(self, spec: LaunchSpec, row: FitItem, report: FitReport) -> None:
        """Ask before starting what does not fit; the arithmetic is shown."""
        from veloxquant.panel.screens.dialogs import Choice

        need, room = row.peak or 0, report.room
        lines = [
            Content(f"{row.method} at {report.context:,} tokens needs {units.size(need)}:"),
            Content.styled(
                f"weights {units.size(report.weights)}, kv {units.size(row.kv)}, the rest while "
                "the prompt is read",
                "$muted",
            ),
            Content.styled(
                f"room now is {units.size(room)} ({clean(report.room_note, 200)})", "$muted"
            ),
        ]
        answers = []
        if row.max_context and row.max_context >= 1024:
            answers.append(("less", "c", f"start with {row.max_context:,} tokens, which fit"))
        answers += [("force", "s", "start as asked; it may end without memory"), ("", "", "back")]

        def take(word: str | None) -> None:
            if word == "less" and row.max_context:
                self.start(msgspec.structs.replace(spec, context=row.max_context))
            elif word == "force":
                self.start(spec)

        self.push_screen(Choice("THIS DOES NOT FIT NOW", lines, answers), take)

    def start_on_next_port(self, spec: LaunchSpec) -> None:
        """Find a free port in a thread, then start there."""

        async def work() -> None:
            port = spec.port + 1
            if self.library is not None:
                port = await asyncio.to_thread(self.library.free_port, spec.host, port)
            await self._start(msgspec.structs.replace(spec, port=port))

        self._go(work())

    def restart(self) -> None:
        """The same again."""
        self._go(self.command("restart", {}))

    def ask_stop(self) -> None:
        """Ask once, naming what is stopped."""
        from veloxquant.panel.screens.dialogs import Choice

        view: View = self.view
        running = view.stats.running if view.stats else 0
        lines = [
            Content.assemble((view.model_name, "bold"), (f" at {view.base_url}", "")),
            Content.styled(
                f"{running} running answers get up to {GRACE:.0f} s to finish"
                if running
                else "no request is running",
                "$muted",
            ),
        ]
        answers = [("stop", "x", "stop the server"), ("", "", "back")]

        def take(word: str | None) -> None:
            if word == "stop":
                self._go(self.command("stop", {"grace": GRACE}))

        self.push_screen(Choice("STOP THE SERVER", lines, answers), take)

    # ---- work -------------------------------------------------------------------------------

    def _go(self, work: Any) -> None:
        self.run_worker(work, group="command", exit_on_error=False)
        if self.current_mode != "run":
            self.switch_mode("run")

    async def _replace(self, spec: LaunchSpec) -> None:
        if await self.command("stop", {"grace": GRACE}) is not None:
            await self._start(spec)

    async def _start(self, spec: LaunchSpec) -> None:
        self.view = replace(self.view, refused=None, refused_spec=None)
        args = {"spec": msgspec.to_builtins(spec)}
        if await self.command("start", args, spec) is not None and self.library is not None:
            await asyncio.to_thread(self.library.keep_start, spec)

    async def command(
        self, op: str, args: dict[str, Any], spec: LaunchSpec | None = None
    ) -> dict[str, Any] | None:
        """Send a command; a refusal is put into the view and None returned."""
        try:
            # pressed before the supervisor is up: it takes a second, so wait instead of refusing
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.linked.wait(), CONNECT_WAIT)
            if self.control is None or not self.linked.is_set():
                raise CommandFailed(
                    "not_connected",
                    "The panel is not connected to the supervisor.",
                    self.view.link_note or "`vq doctor` shows what is in the way.",
                )
            return await self.control.command(op, args)
        except CommandFailed as problem:
            fault = Fault(code=problem.code, message=problem.message, hint=problem.hint)
            if op == "start":
                self.view = replace(self.view, refused=fault, refused_spec=spec)
            else:
                self.notify(
                    f"{op}: {clean(problem.message, 300)} {clean(problem.hint, 300)}",
                    severity="error",
                    timeout=10,
                    markup=False,
                )
            return None

    # ---- chat -------------------------------------------------------------------------------

    def open_desk(self) -> None:
        """Load the last conversation; follow it when a keeper still writes."""
        from veloxquant.panel.chat_desk import ChatDesk, state_folder

        async def work() -> None:
            folder = await asyncio.to_thread(state_folder)
            desk = ChatDesk(folder, self.poke)
            await asyncio.to_thread(desk.load)
            self.desk = desk
            self.poke()
            await desk.follow()

        self.run_worker(work(), group="desk", exit_on_error=False)

    def ask(self, text: str) -> bool:
        """Ask a question; False, with the reason said, when that is not possible now."""
        return self._ask(lambda desk: desk.ask(text, self.view))

    def ask_again(self) -> bool:
        """Ask the last question again."""
        return self._ask(lambda desk: desk.again(self.view))

    def _ask(self, how: Any) -> bool:
        from veloxquant.panel.chat_desk import DeskError

        desk = self.desk
        problem = ""
        if desk is None:
            problem = "the conversation is still being loaded; try again"
        elif desk.answering:
            problem = "an answer is still being written; esc leaves the field, esc again stops it"
        elif not self.view.is_serving:
            problem = "no server is ready; press esc, then 3 to see how it is"
        if problem or desk is None:
            self.notify(problem, severity="warning", markup=False)
            return False

        async def work() -> None:
            try:
                await how(desk)
            except (DeskError, OSError) as error:
                self.notify(clean(error, 300), severity="warning", markup=False)

        self.run_worker(work(), group="ask", exit_on_error=False)
        return True

    def poke(self) -> None:
        """Redraw the area in front."""
        raise NotImplementedError

    def chat_is_answering(self) -> bool:
        """Whether an answer is being written now."""
        return self.desk is not None and self.desk.answering
