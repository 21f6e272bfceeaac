"""`vq uninstall`: remove what this program keeps of one user; its model only when asked to.

Files go one by one, by the names that the program gives, and folders once they are empty: a folder
may hold other things too, since `VELOXQUANT_HOME` can be any, and on a Mac settings, models and
state share one.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from veloxquant.cli import exit_codes
from veloxquant.cli.control import is_running
from veloxquant.cli.output import CliError, envelope, result
from veloxquant.cli.own_files import Found, find_own, left, own_folders
from veloxquant.cli.server import shut_down
from veloxquant.config.folders import HOME_VARIABLE, Folders, folders
from veloxquant.planning.models import printable
from veloxquant.supervisor.lock import InstanceLock, LockTakenError
from veloxquant.supervisor.paths import Paths, find


def run(args: argparse.Namespace) -> int:
    """Stop what runs, remove what is ours, and say what was removed and what stays."""
    if is_running() and shut_down() != "stopped":
        raise CliError(
            "The supervisor is still ending; nothing was removed.", "Run it again in a moment."
        )
    found, paths = folders(), find()
    removed: list[str] = []
    with _alone(paths):
        own = find_own(own_folders(found, paths, models=args.models), _shared())
        for path in own.files:
            _remove(path)
            removed.append(printable(str(path)))
            if not args.json:
                result(f"removed {removed[-1]}")
    _tidy(own, found)
    kept = {printable(str(path)): own.spared.get(path) for path in left(own)}
    if args.json:
        result(envelope({"removed": removed, "kept": list(kept)}))
        return exit_codes.OK
    if not removed:
        result("nothing to remove")
    for path, why in kept.items():
        result(f"kept {path} ({printable(why)})" if why else f"kept {path}")
    return exit_codes.OK


@contextmanager
def _alone(paths: Paths) -> Iterator[None]:
    """Hold the supervisor's lock, so that none starts meanwhile.

    Raises:
        CliError: when one was started again, as an open panel does, or the lock is no file of ours.
    """
    if paths.state.is_symlink() or not paths.state.is_dir():
        yield  # no supervisor starts with its state behind a link
        return
    lock = InstanceLock(paths.lock)
    try:
        lock.take()
    except LockTakenError as taken:
        raise CliError(
            f"{str(taken).capitalize()}; nothing was removed.",
            "Close open panels, which start it again, then run it again.",
            exit_codes.BUSY, "busy",
        ) from taken  # fmt: skip
    except OSError as error:
        raise CliError(
            f"Nothing was removed: {printable(str(paths.lock))}: {error.strerror}.",
            "It must be a plain file of yours; then run it again.",
        ) from error
    try:
        yield
    finally:
        lock.release()


def _shared() -> list[Path]:
    """What other programs use, too: the Hugging Face cache and its token."""
    from huggingface_hub import constants  # resolves HF_HUB_CACHE, HF_HOME and the rest

    return [Path(path).expanduser() for path in (constants.HF_HUB_CACHE, constants.HF_TOKEN_PATH)]


def _remove(path: Path) -> None:
    """Remove a file.

    Raises:
        CliError: when it cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CliError(
            f"{printable(str(path))} cannot be removed: {error.strerror}.",
            "Correct its permissions, then run it again.",
        ) from error


def _tidy(own: Found, found: Folders) -> None:
    """Remove our folders that are empty now, and the one that they all lie in.

    A home that is a link stays, and so does what it points at: the program made neither.
    """
    home = found.state.parent if os.environ.get(HOME_VARIABLE) else None
    for folder in own.folders:
        with suppress(OSError):
            folder.rmdir()
    if home is None:
        return
    if home.is_symlink():
        own.spared[home] = f"a link to {home.readlink()}"
        return
    with suppress(OSError):
        home.rmdir()
