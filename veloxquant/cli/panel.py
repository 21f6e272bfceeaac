"""`vq panel`: open the control panel."""

import argparse
import os
import sys

from veloxquant.cli import exit_codes
from veloxquant.cli.output import CliError


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
