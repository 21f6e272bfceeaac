"""`vq completion`: the shell code that completes commands, flags, models and methods."""

import argparse

from veloxquant.cli import exit_codes
from veloxquant.cli.output import envelope, result


def run(args: argparse.Namespace) -> int:
    """Print the code for one shell."""
    from argcomplete.shell_integration import shellcode

    code = shellcode(["vq", "veloxquant"], shell=args.shell)
    result(envelope({"shell": args.shell, "code": code}) if args.json else code)
    return exit_codes.OK


def model_names(**_: object) -> list[str]:
    """Names of the models on this machine, for the completer."""
    from veloxquant.cli.models import scan

    return [model.name for model in scan().models]


def method_names(**_: object) -> list[str]:
    """Names of the methods that can be started, for the completer."""
    from veloxquant.cache.table import TABLE

    return [row.name for row in TABLE.values() if row.is_ready]
