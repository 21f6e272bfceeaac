"""What the panel needs from the rest: a control connection and a library of local knowledge.

The screens see only these shapes. The real ones are `control.py` (the supervisor's client) and
`library.py` (planning), both imported after the first paint; tests bring their own.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from veloxquant.supervisor.messages import LaunchSpec

Report = Callable[[str, int, int | None], None]


class CommandFailed(Exception):
    """The supervisor refused a command: a code, a sentence, the next step."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


class Control(Protocol):
    """The connection to the supervisor; every method may be called again after a failure."""

    async def connect(self) -> None:
        """Find or start the supervisor and shake hands.

        Raises:
            CommandFailed: when that is impossible, with the reason.
        """
        ...

    def events(self) -> AsyncIterator[Any]:
        """`Snapshot`, `Event` and `state.LinkNews`; never ends, survives reconnects."""
        ...

    async def command(self, op: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send one command and wait for its end.

        Raises:
            CommandFailed: when the supervisor refuses it or the connection is gone.
        """
        ...

    async def close(self) -> None:
        """Let go of the connection; the server goes on."""
        ...


@dataclass(frozen=True, slots=True)
class ModelItem:
    """One model on this machine. `fits_tokens` is None while unknown, 0 when nothing fits."""

    name: str
    path: str
    params: int | None = None
    quant: str = ""
    disk: int | None = None
    fits_tokens: int | None = None
    fits_method: str = ""
    fits_note: str = ""
    runnable: bool = True
    why_not: str = ""
    used_s_ago: float | None = None
    native_context: int = 0
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class FitItem:
    """One method for one model at one context; bytes.

    `kv_high` is the upper bound of a range, `reading` the most kv while a prompt is read.
    """

    method: str
    ready: bool
    kind: str = ""
    bits: float | None = None
    kv: int | None = None
    kv_high: int | None = None
    peak: int | None = None
    max_context: int | None = None
    fits: bool = False
    known: str = ""
    note: str = ""
    blurb: str = ""
    limit: str = ""
    reading: int | None = None


@dataclass(frozen=True, slots=True)
class FitReport:
    """The method table at one context, of which `answer` tokens are an answer; bytes.

    `native_context` is what the model was made for.
    """

    model: ModelItem
    context: int
    batch: int
    room: int
    room_note: str
    weights: int
    native_context: int
    rows: tuple[FitItem, ...]
    notes: tuple[str, ...] = ()
    best: str = ""
    answer: int = 0


@dataclass(frozen=True, slots=True)
class SettingItem:
    """One setting: its value in words, where that comes from, what it means, its variable."""

    key: str
    value: str
    origin: str
    about: str = ""
    variable: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the first look."""

    status: Literal["ok", "warn", "fail"]
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """The machine's memory now, bytes; `limit` is what models may take."""

    used: int
    total: int
    room: int
    note: str = ""


class Library(Protocol):
    """Local knowledge; every call may block and runs in a thread."""

    def memory(self) -> Memory:
        """Memory of this machine now."""
        ...

    def checks(self, models: list[ModelItem]) -> list[Check]:
        """The lines of the first look."""
        ...

    def models(self) -> list[ModelItem]:
        """Models on this machine, those that can run first."""
        ...

    def fit(
        self,
        model: ModelItem,
        context: int,
        batch: int,
        own: int = 0,
        options: Mapping[str, dict[str, Any]] | None = None,
    ) -> FitReport:
        """The method table for one model; `own` bytes of a server that it would replace.

        `options` are settings by method.

        Raises:
            CommandFailed: when the model's sizes cannot be read.
        """
        ...

    def method_settings(self, method: str) -> str:
        """The settings of a method, with their defaults, as `parse_settings` reads them."""
        ...

    def parse_settings(self, method: str, text: str) -> dict[str, Any]:
        """Settings from `name=value` words; a number alone is the bit width.

        Raises:
            CommandFailed: when the method has no such setting or it cannot have the value.
        """
        ...

    def settings(self) -> list[SettingItem]:
        """Every setting with its value and origin."""
        ...

    def config_path(self) -> str:
        """The user's settings file."""
        ...

    def template(self) -> LaunchSpec:
        """A start with everything the settings say and no model."""
        ...

    def last_start(self) -> dict[str, object]:
        """`model` (its name), `method`, `options` and `context` of the last start, if known."""
        ...

    def keep_start(self, spec: LaunchSpec) -> None:
        """Remember a start that was accepted."""
        ...

    def free_port(self, host: str, wanted: int) -> int:
        """`wanted`, or the next port nobody listens on."""
        ...

    def fetch_demo(self, report: Report, cancelled: Callable[[], bool]) -> str:
        """Fetch the small demo model and return its folder.

        Raises:
            CommandFailed: when it could not be fetched, with the reason and the next step.
        """
        ...
