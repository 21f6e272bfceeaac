"""Typed modal dialogs: each returns the chosen word, or nothing."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from veloxquant.panel.bindings import AREAS, KEYS, name_of
from veloxquant.panel.text import pad


class Choice(ModalScreen[str]):
    """A question with named answers; `esc` answers nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss('')", "back", id="choice.back")
    ]

    def __init__(
        self, title: str, lines: Sequence[Content], answers: Sequence[tuple[str, str, str]]
    ) -> None:
        """`answers` are (word to return, key or nothing, what it says)."""
        super().__init__()
        self.heading = title
        self.body_lines = lines
        self.answers = answers

    def compose(self) -> ComposeResult:
        """Title in the border, text, answers."""
        with Vertical(classes="dialog") as box:
            box.border_title = Content(self.heading)
            yield Static(Content("\n").join(self.body_lines), id="choice-text")
            yield OptionList(
                *(
                    Option(
                        Content.assemble((f" {key or ' '} ", "bold $primary"), f" {text}"), id=word
                    )
                    for word, key, text in self.answers
                ),
                id="choice-answers",
            )

    def on_mount(self) -> None:
        """Answers take the focus."""
        self.query_one(OptionList).focus()

    def on_key(self, event: object) -> None:
        """The key of an answer gives it."""
        pressed = getattr(event, "character", None)
        for word, key, _ in self.answers:
            if key and pressed == key:
                self.dismiss(word)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Enter or click."""
        self.dismiss(event.option.id or "")


class AskNumber(ModalScreen[int]):
    """A number of tokens; dismisses 0 for nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(0)", "back", id="number.back")
    ]

    def __init__(self, title: str, about: str, value: int) -> None:
        super().__init__()
        self.heading = title
        self.about = about
        self.value = value

    def compose(self) -> ComposeResult:
        """What is asked, the field, and where errors go."""
        with Vertical(classes="dialog") as box:
            box.border_title = Content(self.heading)
            yield Static(Content.styled(self.about, "$muted"))
            yield Input(str(self.value), id="number")
            yield Static("", id="number-error")

    def on_mount(self) -> None:
        """Type at once; the old number is selected."""
        field = self.query_one(Input)
        field.focus()
        field.action_select_all()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Accept `32k`, `32,768` or `32768`."""
        number = parse_tokens(event.value)
        if number:
            self.dismiss(number)
            return
        self.query_one("#number-error", Static).update(
            Content.styled("give a number of tokens, like 32768 or 32k", "$state-warn")
        )


class AskText(ModalScreen[str | None]):
    """A line of text that `check` finds nothing wrong with; dismisses None for nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "back", id="text.back")
    ]

    def __init__(self, title: str, about: str, value: str, check: Callable[[str], str]) -> None:
        """`check` gives the sentence to show when the text cannot be taken."""
        super().__init__()
        self.heading = title
        self.about = about
        self.value = value
        self.check = check

    def compose(self) -> ComposeResult:
        """What is asked, the field, and where errors go."""
        with Vertical(classes="dialog") as box:
            box.border_title = Content(self.heading)
            yield Static(Content.styled(self.about, "$muted"))
            yield Input(self.value)
            yield Static("", id="text-error")

    def on_mount(self) -> None:
        """Type at once; the old text is selected."""
        field = self.query_one(Input)
        field.focus()
        field.action_select_all()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take it, or say what is wrong."""
        problem = self.check(event.value)
        if not problem:
            self.dismiss(event.value)
            return
        self.query_one("#text-error", Static).update(Content.styled(problem, "$state-warn"))


def parse_tokens(text: str) -> int:
    """Tokens of `32k`, `1m`, `32,768`; k means 1,024. 0 when it is no such number."""
    text = text.strip().lower().replace(",", "").replace("_", "").replace(" ", "")
    scale = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    try:
        value = int(float(digits) * scale)
    except (ValueError, OverflowError):
        return 0
    return value if 1 <= value <= 1 << 24 else 0


class Help(ModalScreen[None]):
    """All keys of this area and the global ones; scrolls when the window is low."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter", "dismiss", "close", id="help.close")
    ]

    def __init__(self, area: str) -> None:
        super().__init__()
        self.area = area

    def compose(self) -> ComposeResult:
        """One line a key."""
        with VerticalScroll(classes="dialog tall") as box:
            box.border_title = Content("KEYS")
            box.border_subtitle = Content("esc closes")
            yield Static(help_lines(self.area))

    def on_mount(self) -> None:
        """Arrows scroll."""
        self.query_one(VerticalScroll).focus()


def help_lines(area: str) -> Content:
    """The keys of `area`, then the global ones."""
    title = next((title for name, _, title in AREAS if name == area), "First look")
    lines: list[Content] = []
    for heading, wanted in ((title, area), ("Everywhere", "app")):
        lines.append(Content.styled(heading, "bold $primary"))
        for key in KEYS:
            if key.area != wanted:
                continue
            names = "  ".join(name_of(k) for k in key.keys.split(","))
            lines.append(Content.assemble((pad(f"  {names}", 14), "bold"), (key.help, "")))
        lines.append(Content(""))
    lines.append(
        Content.styled(
            "Letters act when no text field has the focus; esc leaves a field.\n"
            "Hold shift (or option) while dragging to select text with the mouse.",
            "$muted",
        )
    )
    return Content("\n").join(lines)
