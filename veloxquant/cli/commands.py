"""THE table of commands: names, help, flags and the function that runs each.

A function is named as `module:function` below `veloxquant.cli` and imported when its command runs,
so that help costs no import. It gets the parsed arguments and returns an exit code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """One argument: names and the keywords of `add_argument`."""

    names: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Command:
    """One command; with `subcommands` it only groups, and `default` names the one meant by none."""

    name: str
    help: str
    run: str = ""
    flags: tuple[Flag, ...] = ()
    subcommands: tuple["Command", ...] = ()
    default: str = ""
    epilog: str = ""


def flag(*names: str, **options: Any) -> Flag:
    """Shorthand for a `Flag`."""
    return Flag(names, options)


def tokens(text: str) -> int:
    """A number of tokens: 8192, 8k, 8K, 1M.

    Raises:
        ValueError: for anything else (argparse names the argument).
    """
    scale = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    number = float(text[:-1] if scale > 1 else text.replace("_", "").replace(",", ""))
    if not 1 <= number * scale < 1 << 40 or int(number * scale) != number * scale:
        raise ValueError(text)
    return int(number * scale)


def size(text: str) -> int:
    """A size in bytes: 12G, 512M, 64GiB.

    Raises:
        ValueError: for anything else.
    """
    body = text.strip().upper().removesuffix("IB").removesuffix("B")
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(body[-1:], 1)
    number = float(body[:-1] if scale > 1 else body)
    if not 0 <= number * scale < 1 << 60:
        raise ValueError(text)
    return int(number * scale)


def positive(text: str) -> int:
    """A whole number above zero.

    Raises:
        ValueError: for anything else.
    """
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def port(text: str) -> int:
    """A port number.

    Raises:
        ValueError: for anything else.
    """
    if not 1 <= (number := int(text)) < 65536:
        raise ValueError(text)
    return number


_MODEL = flag("model", metavar="MODEL", help="name as `vq models ls` shows it, or a folder")
_METHOD = flag("--method", metavar="NAME", help="compression method (see `vq methods`)")
_BITS = flag("--bits", type=positive, metavar="N", help="bits per value (bit_width_inlier)")
_SET = flag("--set", action="append", default=[], metavar="FIELD=VALUE", dest="overrides",
            help="one setting of the method; repeatable, an empty value clears it")  # fmt: skip
_CONTEXT = flag(
    "--context", type=tokens, metavar="TOKENS", help="context length, such as 8192 or 32k"
)
_LEVEL = flag("--level", choices=("debug", "info", "warning", "error"),
              help="least level to show (default: the setting logs.level)")  # fmt: skip

COMMANDS: tuple[Command, ...] = (
    Command("panel", "open the control panel (also without any command)", "panel:run"),
    Command("up", "start the server and wait until it is ready", "up:up", (
        flag("model", nargs="?", metavar="MODEL",
             help="name as `vq models ls` shows it, or a folder; default: the last one used"),
        _METHOD, _BITS, _SET, _CONTEXT,
        flag("--batch", type=positive, metavar="N", help="answers at the same time"),
        flag("--host", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)"),
        flag("--port", type=port, metavar="N", help="port to listen on (default 8000)"),
        flag("--max-tokens", type=positive, metavar="N", help="default length of an answer"),
        flag("--memory-limit", type=size, metavar="SIZE", help="most memory to use, such as 12G"),
        flag("--api-key", action="store_true", default=None, help="demand an API key"),
        flag("--detach", action="store_true", help="return at once, do not wait until ready"),
        flag("--force", action="store_true", help="start although it may not fit"),
    ), epilog="The server runs until `vq stop`. Ctrl-C while it starts stops it."),
    Command("status", "say what is running", "server:status", (
        flag("--watch", action="store_true", help="print a line whenever something changes"),
    ), epilog="Exit code: 1 when the server failed; 0 otherwise, also when none runs."),
    Command("stop", "stop the server and wait until it is gone", "server:stop", (
        flag("--grace", type=float, default=10.0, metavar="SECONDS",
             help="time that running answers get to finish (default 10)"),
    )),
    Command("restart", "stop the server and start it with the same settings", "server:restart"),
    Command("logs", "show the server's log", "server:logs", (
        flag("--follow", "-f", action="store_true", help="go on with new lines"),
        _LEVEL,
        flag("--grep", default="", metavar="TEXT", help="only lines with this text"),
        flag("--last", type=positive, default=200, metavar="N", help="newest lines (default 200)"),
    )),
    Command("chat", "talk to the running server", "chat:run", (
        flag("-p", "--prompt", metavar="TEXT",
             help="one question; `-` reads it from standard input; without it, a conversation"),
        flag("--max-tokens", type=positive, metavar="N", help="longest answer"),
        flag("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)"),
        flag("--system", metavar="TEXT", help="system message"),
    )),
    Command("models", "models on this machine", subcommands=(
        Command("ls", "list them, with what runs and why others do not", "models:ls", (
            flag("--quiet", "-q", action="store_true", help="names only"),
            flag("--sort", choices=("name", "size", "used", "fit"), default="name",
                 help="order of the rows"),
            flag("--paths", action="store_true", help="show the folders too"),
        )),
        Command("show", "everything known about one", "models:show", (_MODEL,)),
        Command("demo", "fetch a small model to try everything with (89 MiB)", "models:demo", (
            flag("--quiet", "-q", action="store_true", help="say nothing unless it fails"),
        )),
    ), default="ls"),
    Command("methods", "compression methods", "methods:run", (
        flag("verb", nargs="?", choices=("ls",), help="list them (the only thing to do)"),
        flag("--servable-only", action="store_true", help="only those that can be started now"),
        flag("--family", choices=("quantization", "eviction", "hybrid"), help="only this family"),
    )),
    Command("fit", "what fits: memory and longest context, method by method", "fit:run", (
        _MODEL, _METHOD, _BITS, _SET, _CONTEXT,
        flag("--batch", type=positive, default=1, metavar="N", help="conversations at a time"),
        flag("--answer", type=positive, metavar="N",
             help="tokens of the context that are an answer (default: server.max_tokens)"),
        flag("--ram", type=size, metavar="SIZE", help="assume this much room, such as 12G"),
        flag("--all", action="store_true", help="show also the methods that are left out"),
    )),
    Command("precompute", "fit methods to a model, once; without a model, write matrices",
            "precompute:run", (
        flag("model", nargs="?", metavar="MODEL",
             help="name as `vq models ls` shows it, or a folder"),
        flag("--method", action="append", metavar="NAME",
             help="only this method; repeatable (default: all that can be fitted)"),
        _SET,
        flag("--text", metavar="FILE", help="text to read (default: prose that comes along)"),
        flag("--tokens", type=tokens, default=4096, metavar="N",
             help="how much of it, from 512 on (default 4096)"),
        flag("--head_dim", type=positive, default=128, metavar="D",
             help="without a model: length of the vectors (default 128)"),
        flag("--bits", type=positive, nargs="+", default=[1, 2, 3, 4], metavar="B",
             help="without a model: widths of the codebooks (default 1 2 3 4)"),
        flag("--jl_dim", type=positive, default=128, metavar="M",
             help="without a model: rows of the sketch (default 128)"),
        flag("--seed", type=int, default=42, metavar="N",
             help="without a model: of the matrices (default 42)"),
        flag("--output_dir", default="./artifacts/", metavar="FOLDER",
             help="without a model: where to write (default ./artifacts/)"),
    ), epilog="What is fitted to a model is kept for exactly these weights and used from then on."),
    Command("doctor", "check this machine and say what to do", "doctor:run"),
    Command("config", "settings", subcommands=(
        Command("ls", "all settings and where each comes from", "config:ls"),
        Command("get", "one setting", "config:get", (flag("key", metavar="KEY"),)),
        Command("set", "change one setting; an empty value goes back to the default",
                "config:set_", (flag("key", metavar="KEY"), flag("value", metavar="VALUE"))),
        Command("path", "the settings file", "config:path"),
    ), default="ls"),
    Command("shutdown", "stop the server and the supervisor", "server:shutdown"),
    Command("uninstall", "remove settings, state and fitted constants of this program",
            "uninstall:run", (
        flag("--models", action="store_true", help="remove also the demo model that it made"),
    ), epilog="It asks nothing. What runs is stopped first. The Hugging Face cache stays always."),
    Command("completion", "print the line that turns on completion", "completion:run", (
        flag("shell", choices=("bash", "zsh", "fish"), help="your shell"),
    )),
)  # fmt: skip


def walk(commands: Sequence[Command], act: Callable[[tuple[str, ...], Command], None]) -> None:
    """Call `act` with the words and the entry of every command that runs."""
    for command in commands:
        for inner in command.subcommands:
            act((command.name, inner.name), inner)
        if command.run:
            act((command.name,), command)
