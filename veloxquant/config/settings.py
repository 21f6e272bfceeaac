"""The user's settings: one table of keys, one file, one rule of precedence.

A value comes from the flag, else the environment, else `config.toml`, else the default, and each
knows its origin. Comments, unknown keys and layout of the file are kept; a file that cannot be
read is renamed, never overwritten.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from veloxquant.config.files import set_aside, write_atomically
from veloxquant.config.folders import folders
from veloxquant.config.method_names import BASELINE, METHOD_NAMES

Origin = Literal["flag", "environment", "config file", "default"]
BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
AUTO = "auto"
THEMES = (
    AUTO, "velox", "ansi-dark", "ansi-light", "atom-one-dark", "atom-one-light",
    "catppuccin-frappe", "catppuccin-latte", "catppuccin-macchiato", "catppuccin-mocha", "dracula",
    "flexoki", "gruvbox", "monokai", "nord", "rose-pine", "rose-pine-dawn", "rose-pine-moon",
    "solarized-dark", "solarized-light", "textual-dark", "textual-light", "tokyo-night",
)  # fmt: skip
"""Ours and those of Textual, which is not imported to check a name."""
_MOST_TOKENS = (1 << 40) - 1
_MOST_BYTES = (1 << 60) - 1
"""As the flags of the command line take them."""
_MANY = 8


class SettingError(ValueError):
    """Raised for an unknown setting or a value that it cannot have."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: `choices` or `low`..`high` bound it; `optional` may be empty."""

    key: str
    kind: type
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    optional: bool = False

    @property
    def variable(self) -> str:
        """Name of the environment variable that overrides it."""
        return "VELOXQUANT_" + self.key.upper().replace(".", "_")


SETTINGS: dict[str, Setting] = {
    s.key: s
    for s in (
        Setting("server.host", str, "127.0.0.1", "address to listen on"),
        Setting("server.port", int, 8000, "port to listen on", low=1, high=65535),
        Setting("server.api_key", bool, False, "demand an API key"),
        Setting("server.method", str, "turboquant_rvq", "method that is used when none is named",
                (AUTO, BASELINE, *METHOD_NAMES)),
        Setting("server.context", int, 8192, "context length in tokens", low=16,
                high=_MOST_TOKENS),
        Setting("server.batch", int, 8, "answers at the same time", low=1, high=256),
        Setting("server.max_tokens", int, 512, "default length of an answer", low=1,
                high=_MOST_TOKENS),
        Setting("server.openblas", bool, True, "load OpenBLAS on Linux when it is installed"),
        Setting("memory.keep_free", int, None, "bytes left to the system; empty: one eighth",
                low=0, high=_MOST_BYTES, optional=True),
        Setting("memory.guard", str, "ask", "when the estimate says it does not fit",
                ("ask", "refuse", "off")),
        Setting("models.folders", list, [], "more folders to look for models in"),
        Setting("logs.level", str, "info", "least level to show",
                ("debug", "info", "warning", "error")),
        Setting("look.theme", str, "auto", "colours of the panel", THEMES),
        Setting("look.ascii", bool, False, "draw with ASCII only"),
        Setting("chat.temperature", float, 0.7, "of the panel's chat; 0: always the likeliest word",
                low=0, high=2),
        Setting("panel.quit", str, "ask", "the server when the panel closes",
                ("ask", "stop", "keep")),
    )
}  # fmt: skip


def setting(key: str) -> Setting:
    """The entry of one key.

    Raises:
        SettingError: for an unknown key, with the nearest known ones.
    """
    if found := SETTINGS.get(key):
        return found
    raise SettingError(_no_setting(key))


def _no_setting(key: str) -> str:
    near = _near(key, SETTINGS) or list(SETTINGS)
    return f"there is no setting {key!r}; known: {', '.join(near)}"


def _near(text: str, known: Iterable[str]) -> list[str]:
    import difflib  # for faults only

    return difflib.get_close_matches(text, known, n=3)


def check(entry: Setting, value: Any) -> Any:
    """`value` if the setting can have it.

    Raises:
        SettingError: naming the setting, the value and what is possible.
    """
    if value is None and entry.optional:
        return None
    if entry.kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    right = isinstance(value, entry.kind) and (entry.kind is bool or not isinstance(value, bool))
    if entry.kind is list:
        right = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if not right:
        raise _impossible(entry, value)
    outside = isinstance(value, int | float) and not (
        (entry.low is None or value >= entry.low) and (entry.high is None or value <= entry.high)
    )
    if outside or (entry.choices and value not in entry.choices):
        raise _impossible(entry, value)
    return value


def _impossible(entry: Setting, value: Any) -> SettingError:
    return SettingError(f"{entry.key}={value!r} is not possible; it must be {_legal(entry, value)}")


def _legal(entry: Setting, value: Any) -> str:
    """What a setting can be; of many names those that look like `value`, when there are any."""
    if len(entry.choices) > _MANY and (near := _near(str(value), entry.choices)):
        return f"one of {len(entry.choices)} names, such as {', '.join(near)}"
    if entry.choices:
        return "one of " + ", ".join(map(str, entry.choices))
    name = {int: "a whole number", bool: "true or false", str: "a text", list: "a list of texts"}
    bounds = [
        f"{word} {bound}"
        for word, bound in (("at least", entry.low), ("at most", entry.high))
        if bound is not None
    ]
    return " ".join([name.get(entry.kind, "a number"), " and ".join(bounds)]).strip()


def parse(entry: Setting, text: str) -> Any:
    """A value from text, as typed on the command line or set in the environment.

    Raises:
        SettingError: when the setting cannot have it.
    """
    text = text.strip()
    if not text and entry.optional:
        return None
    value: Any = text
    try:
        if entry.kind is int:
            value = int(text.replace("_", ""))
        elif entry.kind is float:
            value = float(text)
        elif entry.kind is list:
            value = [part.strip() for part in text.split(",") if part.strip()]
    except ValueError:
        pass  # `check` names what is possible
    if entry.kind is bool:
        value = BOOLEANS.get(text.lower(), text)
    return check(entry, value)


@dataclass(frozen=True, slots=True)
class Settings:
    """Values in force with their origins; `notices` are sentences for the user."""

    values: dict[str, Any]
    origins: dict[str, Origin]
    notices: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    path: Path = field(default_factory=lambda: folders().config_file)

    def value(self, key: str) -> Any:
        """The value in force.

        Raises:
            SettingError: for an unknown key.
        """
        return self.values[setting(key).key]

    def origin(self, key: str) -> Origin:
        """Where the value comes from.

        Raises:
            SettingError: for an unknown key.
        """
        return self.origins[setting(key).key]


def load_settings(flags: Mapping[str, Any] | None = None, *, path: Path | None = None) -> Settings:
    """Settings in force; never fails: what cannot be used is named in `notices`.

    Args:
        flags: values given on the command line, by key; None means not given.
        path: the file; the user's own by default.
    """
    path = path or folders().config_file
    notices: list[str] = []
    table, unknown = _read(path, notices), []
    values, origins = {}, {}
    for key, entry in SETTINGS.items():
        values[key], origins[key] = entry.default, "default"
        section, _, name = key.partition(".")
        inner = table.get(section)
        if isinstance(inner, dict) and name in inner:
            try:
                values[key], origins[key] = check(entry, inner[name]), "config file"
            except SettingError as error:
                notices.append(f"{path.name}: {error}; using {entry.default!r}")
        if (text := os.environ.get(entry.variable)) is not None:
            try:
                values[key], origins[key] = parse(entry, text), "environment"
            except SettingError as error:
                notices.append(f"{entry.variable}: {error}; ignored")
        if flags and flags.get(key) is not None:
            values[key], origins[key] = flags[key], "flag"
    for section, inner in table.items():
        names = inner if isinstance(inner, dict) else {"": None}
        unknown += [
            f"{section}.{name}".rstrip(".") for name in names if f"{section}.{name}" not in SETTINGS
        ]
    notices += [f"{path.name}: {_no_setting(name)}; ignored" for name in unknown]
    return Settings(values, origins, tuple(notices), tuple(unknown), path)


def _read(path: Path, notices: list[str]) -> dict[str, Any]:
    """The file as plain values; empty when there is none or it was set aside."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        notices.append(f"{path.name} cannot be read ({error.strerror}); using defaults")
        return {}
    import tomllib

    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        try:
            kept = set_aside(path)
        except OSError:
            notices.append(f"{path.name} is not valid TOML ({error}); using defaults")
        else:
            notices.append(
                f"{path.name} was not valid TOML ({error}); it is kept as {kept.name} "
                f"and defaults are used"
            )
        return {}


def save_setting(key: str, value: Any, *, path: Path | None = None) -> None:
    """Write one setting; None takes it out. Everything else in the file stays as it is.

    Raises:
        SettingError: for an unknown key or a value that it cannot have.
        OSError: when the file cannot be written.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    entry = setting(key)
    if value is not None:
        check(entry, value)
    path = path or folders().config_file
    _read(path, [])  # sets an unreadable file aside, so that it is not overwritten
    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        document = tomlkit.document()
    except TOMLKitError as error:
        raise SettingError(f"{path.name} cannot be changed: {error}") from error
    section, _, name = key.partition(".")
    inner = document.get(section)
    if value is None:
        if isinstance(inner, dict):
            inner.pop(name, None)
    else:
        if not isinstance(inner, dict):
            inner = tomlkit.table()
            document[section] = inner
        inner[name] = value
    write_atomically(path, tomlkit.dumps(document))
