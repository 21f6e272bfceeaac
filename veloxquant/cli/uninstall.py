"""`vq uninstall`: remove what this program keeps of one user; models only when that is asked for.

Only names that the program itself gives are removed, since a folder may hold other things too:
`VELOXQUANT_HOME` can be any folder, and on a Mac settings, models and state share one.
"""

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from veloxquant.cli import exit_codes
from veloxquant.cli.control import is_running
from veloxquant.cli.output import CliError, envelope, result
from veloxquant.cli.server import shut_down
from veloxquant.config.folders import HOME_VARIABLE, Folders, folders
from veloxquant.planning.models import printable
from veloxquant.supervisor.lock import InstanceLock, LockTakenError
from veloxquant.supervisor.paths import Paths, find

CONFIG = ("config.toml", "config.toml.corrupt-*", ".config.toml[.-]*")
DATA = ("artifacts",)
SCRATCH = (".demo-*",)
STATE = (
    "last_start.json", ".last_start.json[.-]*", "journal.json", "journal.json.corrupt-*",
    ".journal.json.*", "token", ".token.*", "supervisor.lock", "chat-*.jsonl", "chat-*.stop",
)  # fmt: skip
RUN = ("control.sock",)
LOG = ("supervisor.log", "server.log", "server.log.[0-9]*", "log-*.txt", "layers-*.csv")


def run(args: argparse.Namespace) -> int:
    """Stop what runs, remove what is ours, and say what was removed and what stays."""
    if is_running() and shut_down() != "stopped":
        raise CliError(
            "The supervisor is still ending; nothing was removed.", "Run it again in a moment."
        )
    found, paths = folders(), find()
    removed: list[str] = []
    with _alone(paths):
        for path in _ours(found, paths, models=args.models):
            _remove(path)
            removed.append(printable(str(path)))
            if not args.json:
                result(f"removed {removed[-1]}")
    _tidy(found, paths)
    kept = [printable(str(path)) for path in _left(found, paths)]
    if args.json:
        result(envelope({"removed": removed, "kept": kept}))
        return exit_codes.OK
    if not removed:
        result("nothing to remove")
    for path in kept:
        result(f"kept {path}")
    return exit_codes.OK


@contextmanager
def _alone(paths: Paths) -> Iterator[None]:
    """Hold the supervisor's lock, so that none starts meanwhile.

    Raises:
        CliError: when one was started again, as an open panel does.
    """
    if not paths.state.is_dir():
        yield
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
    try:
        yield
    finally:
        lock.release()


def _ours(found: Folders, paths: Paths, *, models: bool) -> Iterator[Path]:
    """What the program made and is there."""
    for folder, patterns in (
        (found.config, CONFIG),
        (found.data, DATA),
        (found.models, ("*",) if models else SCRATCH),
        (paths.state, STATE),
        (paths.run, RUN),
        (paths.log, LOG),
    ):
        made = {path for pattern in patterns for path in folder.glob(pattern)}
        yield from sorted(path for path in made if not _is_hub(path))


def _is_hub(path: Path) -> bool:
    """Whether the Hugging Face cache, which other programs share, is or lies in a folder."""
    from huggingface_hub import constants  # resolves HF_HUB_CACHE, HF_HOME and the rest

    return Path(constants.HF_HUB_CACHE).expanduser().absolute().is_relative_to(path)


def _remove(path: Path) -> None:
    """Remove a file or a folder; of a link only the link.

    Raises:
        CliError: when it cannot be removed.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CliError(
            f"{printable(str(path))} cannot be removed: {error.strerror}.",
            "Correct its permissions, then run it again.",
        ) from error


def _all(found: Folders, paths: Paths) -> list[Path]:
    """Our folders, inner ones first."""
    every = {found.config, found.data, found.models, found.state, *paths}
    return sorted(every, key=lambda folder: (-len(folder.parts), folder))


def _tidy(found: Folders, paths: Paths) -> None:
    """Remove our folders that are empty now, and the one that they all lie in."""
    home = [found.state.parent] if os.environ.get(HOME_VARIABLE) else []
    for folder in [*_all(found, paths), *home]:
        with suppress(OSError):
            folder.rmdir()


def _left(found: Folders, paths: Paths) -> list[Path]:
    """What is still there: models, and what the program did not make."""
    ours = _all(found, paths)
    return sorted(
        {
            path
            for folder in ours
            if folder.is_dir()
            for path in folder.iterdir()
            if path not in ours
        }
    )
