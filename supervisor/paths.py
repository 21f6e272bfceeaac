"""Folders and files of the supervisor, their modes, and the length of the socket's path.

Everything lies below `$VELOXQUANT_HOME` when that is set, else in the platform's own places.
"""

import hashlib
import os
import stat
import sys
from pathlib import Path
from typing import NamedTuple

HOME_VARIABLE = "VELOXQUANT_HOME"
MAX_SOCKET_BYTES = 103
_SOCKET = "control.sock"


class UnsafeFolderError(RuntimeError):
    """Raised when a folder of ours belongs to someone else, is a link, or others may write it."""


class Paths(NamedTuple):
    """Where one user's supervisor keeps its things."""

    run: Path
    state: Path
    log: Path

    @property
    def socket(self) -> Path:
        """The control socket."""
        return self.run / _SOCKET

    @property
    def lock(self) -> Path:
        """The lock file; it lies with the state, since cleaners of temporary folders delete."""
        return self.state / "supervisor.lock"

    @property
    def journal(self) -> Path:
        """The crash journal."""
        return self.state / "journal.json"

    @property
    def token(self) -> Path:
        """The API token of the running server."""
        return self.state / "token"


def find() -> Paths:
    """Folders for this user and environment; nothing is created."""
    import platformdirs

    if home := os.environ.get(HOME_VARIABLE):
        base = Path(home).expanduser().absolute()
        found = Paths(base / "run", base / "state", base / "log")
    else:
        dirs = platformdirs.PlatformDirs("veloxquant", appauthor=False)
        state = Path(dirs.user_state_dir)
        found = Paths(_runtime(state, dirs), state, Path(dirs.user_log_dir))
    if len(os.fsencode(found.socket)) > MAX_SOCKET_BYTES:
        found = found._replace(run=_short(found.run))
    return found


def prepare(paths: Paths) -> Paths:
    """Create the three folders with mode 0700 and check them.

    Raises:
        UnsafeFolderError: when one of them cannot be trusted; it says which and why.
    """
    for folder in paths:
        secure_folder(folder)
    return paths


def secure_folder(folder: Path) -> None:
    """Create `folder` for us alone, or check that it is.

    Raises:
        UnsafeFolderError: when it is a link, another user's, no folder, or writable by others.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UnsafeFolderError(f"cannot use the folder {folder}: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode):
        raise UnsafeFolderError(f"{folder} is a link; remove it, or set {HOME_VARIABLE}")
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeFolderError(f"{folder} is no folder; move it away, or set {HOME_VARIABLE}")
    if found.st_uid != os.geteuid():
        raise UnsafeFolderError(
            f"{folder} belongs to user id {found.st_uid}; set {HOME_VARIABLE} to a folder of yours"
        )
    if found.st_mode & 0o022:
        raise UnsafeFolderError(
            f"{folder} can be written by others (mode {stat.S_IMODE(found.st_mode):o}); "
            f"look at what is in it, then `chmod 700` it or remove it"
        )
    if found.st_mode & 0o055:
        folder.chmod(0o700)


def _runtime(state: Path, dirs: object) -> Path:
    if sys.platform == "darwin":
        return Path(dirs.user_runtime_dir)  # type: ignore[attr-defined]
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if given and Path(given).is_dir():
        return Path(given) / "veloxquant"
    # A fallback below /tmp could be made by anyone first; the state folder is ours.
    return state / "run"


def _short(long: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(long)).hexdigest()[:12]
    return Path("/tmp") / f"vq-{os.geteuid()}-{digest}"  # noqa: S108 - 0700 and checked by prepare
