"""`vq panel`: open the control panel."""

import argparse
import os
import sys

from veloxquant.cli import exit_codes
from veloxquant.cli.output import CliError, complain


def run(args: argparse.Namespace) -> int:
    """Open the panel, when this terminal can draw it."""
    from veloxquant.panel.__main__ import main, refusal

    if args.json:
        raise CliError(
            "The panel draws on a terminal; it has no JSON.", "Use `vq status --json`.",
            exit_codes.USAGE, "usage",
        )  # fmt: skip
    tty = sys.stdin.isatty() and sys.stdout.isatty()
    if why := refusal(os.environ, tty):
        raise CliError(f"{why}.", "", exit_codes.USAGE, "usage")
    return main() or exit_codes.OK


def build_parser() -> argparse.ArgumentParser:
    """The parser of this command alone."""
    parser = argparse.ArgumentParser(prog="veloxquant panel")
    parser.add_argument("--json", action="store_true", help="refused: the panel draws")
    return parser


def main() -> int:
    """Open the panel; the documented entry point."""
    try:
        return run(build_parser().parse_args())
    except CliError as error:
        return complain(error, as_json=False)
