"""Try the server: one conversation, streamed, with the context it fills."""

from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import TextArea

from veloxquant.panel import bindings, units
from veloxquant.panel.screens.area import AreaScreen
from veloxquant.panel.state import View, kv_held
from veloxquant.panel.text import clean, clean_block
from veloxquant.panel.theme import GLYPHS
from veloxquant.panel.transcript import Turn
from veloxquant.panel.widgets.words import Words

MAX_SHOWN = 60


class Prompt(TextArea):
    """Enter sends, alt+enter or ctrl+j begins a new line."""

    class Sent(Message):
        """The user wants an answer."""

    async def _on_key(self, event: events.Key) -> None:
        if event.key in ("alt+enter", "shift+enter", "ctrl+j"):
            event.stop()
            event.prevent_default()
            self.insert("\n")
        elif event.key == "enter":
            event.stop()
            event.prevent_default()
            self.post_message(self.Sent())
        else:
            await super()._on_key(event)


def facts_of(turn: Turn) -> str:
    """The small line below an answer."""
    parts = []
    if turn.speed:
        parts.append(units.speed(turn.speed))
    if turn.ttft is not None:
        parts.append(f"first token {units.seconds(turn.ttft)}")
    if turn.output_tokens:
        parts.append(f"{turn.output_tokens:,} tokens")
    words = {"stop": "", "length": "cut at max_tokens", "stopped": "stopped by you"}
    if finish := words.get(turn.finish, f"finish {clean(turn.finish, 40)}" if turn.finish else ""):
        parts.append(finish)
    return "   ".join(parts)


def turn_content(turn: Turn, cursor: bool) -> Content:
    """One turn as it is drawn; foreign text is cleaned and never parsed."""
    if turn.role == "user":
        return Content.assemble(("you\n", "bold $primary"), clean_block(turn.text))
    parts: list[tuple[str, str]] = [(f"{clean(turn.model, 60) or 'model'}\n", "bold $mem-kv")]
    if turn.thought:
        parts.append((clean_block(turn.thought).strip() + "\n\n", "$muted italic"))
    parts.append((clean_block(turn.text.lstrip("\n")), ""))
    if turn.status == "open":
        parts.append((GLYPHS.full if cursor else " ", "$mem-kv"))
    if turn.problem:
        parts.append(
            (f"\n{GLYPHS.warn} {clean(turn.problem, 400)} {clean(turn.hint, 300)}", "$state-warn")
        )
    elif facts := facts_of(turn):
        parts.append((f"\n{facts}", "$muted"))
    return Content.assemble(*parts)


class ChatScreen(AreaScreen):
    """Draws the desk of the app; owns nothing that matters."""

    AREA = "chat"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings.of("chat")]

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[Turn] = []
        self._blink = False

    def body(self) -> ComposeResult:
        """Conversation, context, prompt."""
        yield VerticalScroll(Words("", id="chat-empty"), id="chat-turns", can_focus=True)
        yield Words("", id="chat-context", classes="line")
        yield Prompt(id="chat-prompt", compact=True, placeholder="ask something; enter sends")
        yield Words("", id="chat-note", classes="line muted")

    def on_mount(self) -> None:
        """Type at once."""
        super().on_mount()
        self.query_one(Prompt).focus()

    def show(self, view: View, now: float) -> None:
        """Draw the conversation and the gauge."""
        super().show(view, now)
        self._blink = not self._blink
        self.draw_turns()
        self.query_one("#chat-context", Words).update(self._gauge(view))
        note = "enter sends   alt+enter new line   esc leaves the field, then 1-7 and letters act"
        if self.panel.chat_is_answering():
            note = "esc leaves the field, then 1-7 and letters act; esc again stops the answer"
            if not self.query_one(Prompt).has_focus:
                note = "esc stops the answer   1-7 go elsewhere, the answer goes on   i writes"
        elif not self.query_one(Prompt).has_focus:
            note = "1-7 and letters act   i or enter goes back to the field"
        elif not view.is_serving:
            note = "no server is ready: 3 shows how it is (esc leaves this field first)"
        self.query_one("#chat-note", Words).update(Content(note))

    def draw_turns(self) -> None:
        """Update what changed; the view stays at the end unless the reader scrolled up."""
        desk = self.panel.desk
        turns = list(desk.turns[-MAX_SHOWN:]) if desk else []
        waiting = bool(desk and desk.answering and (not turns or turns[-1].status != "open"))
        if waiting:
            turns.append(Turn("model", status="open", model=self.panel.view.model_name))
        scroll = self.query_one("#chat-turns", VerticalScroll)
        at_end = scroll.scroll_offset.y >= scroll.max_scroll_y - 2
        shown = list(scroll.query(".turn").results(Words))
        for index, turn in enumerate(turns):
            same = index < len(self._drawn) and self._drawn[index] is turn
            if same and turn.status != "open":
                continue
            content = turn_content(turn, self._blink)
            if index < len(shown):
                shown[index].update(content)
                shown[index].set_class(turn.role == "user", "question")
            else:
                kind = "turn question" if turn.role == "user" else "turn"
                scroll.mount(Words(content, classes=kind))
        for extra in shown[len(turns) :]:
            extra.remove()
        moved = turns != self._drawn or any(turn.status == "open" for turn in turns)
        self._drawn = turns
        self.query_one("#chat-empty").display = not turns
        if not turns:
            self.query_one("#chat-empty", Words).update(self._empty())
        if at_end and moved:
            scroll.scroll_end(animate=False)

    def _empty(self) -> Content:
        if self.panel.view.is_serving:
            return Content.assemble(
                ("Ask something.\n", "bold"),
                ("Answers are streamed from ", "$muted"), (self.panel.view.base_url, ""),
                (" and kept when the panel is closed.", "$muted"),
            )  # fmt: skip
        return Content.assemble(
            ("No server is ready.\n", "bold"),
            ("esc, then 1 picks a model and 3 shows the server.", "$muted"),
        )

    def _gauge(self, view: View) -> Content:
        limit = view.spec.context if view.spec else 0
        desk = self.panel.desk
        used = 0
        for turn in reversed(desk.turns if desk else ()):
            if turn.prompt_tokens:
                used = turn.prompt_tokens + turn.output_tokens
                break
        bar = max(8, min(40, self.size.width - 60))
        full = min(bar, round(bar * used / limit)) if limit else 0
        full = max(1, full) if used else full
        style = "$state-warn" if limit and used > 0.9 * limit else "$mem-kv"
        parts: list[tuple[str, str]] = [
            ("context ", "$muted"),
            (GLYPHS.full * full, style), (GLYPHS.empty * (bar - full), "$faint"),
            (f" {used:,}/{limit:,} tokens" if limit else " -", ""),
        ]  # fmt: skip
        if view.stats is not None and view.is_serving:
            parts += [("   kv ", "$muted"), (units.size(kv_held(view.stats)), "$mem-kv")]
            if view.stats.kv_fp16:
                parts.append((f" (uncompressed {units.size(view.stats.kv_fp16)})", "$muted"))
        return Content.assemble(*parts)

    # ---- actions ----------------------------------------------------------------------------

    @on(Prompt.Sent)
    def _sent(self) -> None:
        prompt = self.query_one(Prompt)
        text = prompt.text.strip()
        if text and self.panel.ask(text):
            prompt.clear()

    def action_stop(self) -> None:
        """Leave the text field; outside it, stop the answer."""
        desk = self.panel.desk
        if self.query_one(Prompt).has_focus:
            self.query_one("#chat-turns").focus()
            self.show(self.panel.view, self.panel.clock())
        elif desk is not None and desk.answering:
            desk.stop()

    def action_new(self) -> None:
        """A new conversation."""
        if self.panel.desk is not None:
            self.panel.desk.new()
        self.query_one(Prompt).focus()

    def action_copy(self) -> None:
        """Copy the last answer."""
        desk = self.panel.desk
        answers = [turn.text for turn in (desk.turns if desk else ()) if turn.role == "model"]
        if answers:
            self.panel.copy(clean_block(answers[-1]), "the answer")

    def action_retry(self) -> None:
        """Ask the last question again."""
        self.panel.ask_again()

    def action_write(self) -> None:
        """Back to the text field."""
        self.query_one(Prompt).focus()
