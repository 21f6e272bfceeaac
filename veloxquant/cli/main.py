"""The `veloxquant` (short: `vq`) command.

The parser is built from the table in `commands.py`; argparse, one framework. Only the command that
runs is imported.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from veloxquant import __version__
from veloxquant.cli import exit_codes
from veloxquant.cli.commands import COMMANDS, Command
from veloxquant.cli.output import CliError, complain, usage_error

DESCRIPTION = "Run long conversations with local language models: smaller KV caches, live gauges."
EPILOG = "\n".join(
    [
        "Without a command the panel opens. Every command takes --json.",
        "\nexit codes:",
        *(f"  {code:<4} {text}" for code, text in exit_codes.MEANING.items()),
    ]
)


class Parser(argparse.ArgumentParser):
    """argparse that reports through `CliError` and accepts no shortened flags."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        usage_error(f"{self.prog}: {message}", f"See `{self.prog} --help`.")


def _name() -> str:
    called = os.path.basename(sys.argv[0])  # noqa: PTH119 - cheaper than a Path
    return called if called in ("vq", "veloxquant") else "veloxquant"


def _add(command: Command, parsers: Any) -> None:
    parser = parsers.add_parser(
        command.name, help=command.help, description=f"{command.help}.", epilog=command.epilog
    )
    if command.subcommands:
        # SUPPRESS: a default of the inner level would overwrite the outer flag
        parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS,
                            help="print JSON")  # fmt: skip
        inner = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
        for sub in command.subcommands:
            _add(sub, inner)
        default = next(sub for sub in command.subcommands if sub.name == command.default)
        parser.set_defaults(run=default.run, **_defaults(default))
        return
    for flag in command.flags:
        action = parser.add_argument(*flag.names, **flag.options)
        if action.dest in ("model", "method"):
            action.completer = _completer(action.dest)  # pyright: ignore[reportAttributeAccessIssue]
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    parser.set_defaults(run=command.run)


def _completer(dest: str) -> Callable[..., list[str]]:
    """What argcomplete offers for a model or a method."""

    def names(**_: Any) -> list[str]:
        from veloxquant.cli import completion

        return completion.model_names() if dest == "model" else completion.method_names()

    return names


def _defaults(command: Command) -> dict[str, Any]:
    """What the flags of a command are when it is meant but not written."""
    parser = Parser()
    for flag in command.flags:
        parser.add_argument(*flag.names, **flag.options)
    return vars(parser.parse_args([]))


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(
        prog=_name(),
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"veloxquant {__version__}")
    parser.add_argument("--json", action="store_true", default=False, help="print JSON")
    parsers = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        _add(command, parsers)
    parser.set_defaults(run="panel:run")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    try:
        parser = build_parser()
        if "_ARGCOMPLETE" in os.environ:
            import argcomplete

            argcomplete.autocomplete(parser)
        args = parser.parse_args(words)
        module, _, function = args.run.partition(":")
        command = getattr(importlib.import_module(f"veloxquant.cli.{module}"), function)
        return command(args)
    except CliError as error:
        return complain(error, as_json)
    except KeyboardInterrupt:
        error = CliError("interrupted", exit_code=exit_codes.INTERRUPTED, code="interrupted")
        return complain(error, as_json)
    except BrokenPipeError:
        # the reader left (`vq logs | head`); keep Python from complaining at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.OK
