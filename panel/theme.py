"""Semantic colours and the glyphs that carry the same meaning without colour."""

import os
from typing import NamedTuple

from textual.theme import Theme

DARK = {
    "ink": "#e8eaf2",
    "muted": "#98a1b5",
    "faint": "#667089",
    "rule": "#343b4d",
    "pick": "#26304a",
    "mem-weights": "#7c9cff",
    "mem-kv": "#35d0a5",
    "mem-other": "#b48ef0",
    "mem-prompt": "#f0b455",
    "mem-free": "#3a4256",
    "state-ready": "#4ade80",
    "state-busy": "#56c7f5",
    "state-warn": "#f5b94a",
    "state-failed": "#ff7b7b",
    "state-off": "#98a1b5",
    "owner-1": "#35d0a5",
    "owner-2": "#7c9cff",
    "owner-3": "#f0b455",
    "owner-4": "#b48ef0",
    "owner-5": "#56c7f5",
    "owner-6": "#ff9e7b",
}

ANSI = {
    "ink": "ansi_default",
    "muted": "ansi_default",
    "faint": "ansi_bright_black",
    "rule": "ansi_bright_black",
    "pick": "ansi_blue",
    "mem-weights": "ansi_bright_blue",
    "mem-kv": "ansi_bright_green",
    "mem-other": "ansi_bright_magenta",
    "mem-prompt": "ansi_bright_yellow",
    "mem-free": "ansi_bright_black",
    "state-ready": "ansi_bright_green",
    "state-busy": "ansi_bright_cyan",
    "state-warn": "ansi_bright_yellow",
    "state-failed": "ansi_bright_red",
    "state-off": "ansi_default",
    "owner-1": "ansi_bright_green",
    "owner-2": "ansi_bright_blue",
    "owner-3": "ansi_bright_yellow",
    "owner-4": "ansi_bright_magenta",
    "owner-5": "ansi_bright_cyan",
    "owner-6": "ansi_bright_red",
}

VELOX = Theme(
    name="velox",
    primary="#7c9cff",
    secondary="#35d0a5",
    accent="#7c9cff",
    warning="#f5b94a",
    error="#ff7b7b",
    success="#4ade80",
    foreground="#e8eaf2",
    background="#10131b",
    surface="#161a25",
    panel="#1c2130",
    dark=True,
    variables=DARK,
)


class Glyphs(NamedTuple):
    """Drawing characters; every meaning has its own, so that colour is never needed."""

    weights: str
    kv: str
    other: str
    prompt: str
    free: str
    limit: str
    full: str
    part: str
    empty: str
    pointer: str
    dot: str
    rule: str
    bars: str
    ok: str
    warn: str
    fail: str
    now: str
    next: str


BLOCKS = Glyphs(
    "█", "▓", "▒", "░", "·", "│", "█", "▄", "·", "❯", "●", "─", " ▁▂▃▄▅▆▇█", "✓", "!", "✗", "▸", "·"
)
PLAIN = Glyphs(
    "w", "k", "+", "p", ".", "|", "#", "*", ".", ">", "*", "-", " ..::||##", "+", "!", "x", ">", "."
)


def _look(env: "os._Environ[str] | dict[str, str]", name: str) -> str:
    """What the settings said at the start, or the environment where nobody read them."""
    return env.get(f"_VELOXQUANT_{name}", env.get(f"VELOXQUANT_LOOK_{name}", ""))


def glyphs(env: "os._Environ[str] | dict[str, str] | None" = None) -> Glyphs:
    """Blocks, or plain ASCII when the terminal cannot or the setting `look.ascii` says so."""
    env = os.environ if env is None else env
    if _look(env, "ASCII").lower() in ("1", "true", "yes", "on"):
        return PLAIN
    locale = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or "UTF-8"
    return PLAIN if locale in ("C", "POSIX") else BLOCKS


GLYPHS = glyphs()


def theme_name(env: "os._Environ[str] | dict[str, str] | None" = None) -> str:
    """The theme for this terminal: ours with true colour, the terminal's own colours without."""
    env = os.environ if env is None else env
    named = _look(env, "THEME") or "auto"
    if named not in ("", "auto"):
        return named
    if env.get("COLORTERM", "").lower() in ("truecolor", "24bit") or "NO_COLOR" in env:
        return "velox"
    return "velox" if env.get("TERM", "").endswith("-direct") else "ansi-dark"
