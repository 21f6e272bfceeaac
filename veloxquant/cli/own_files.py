"""Which files the program writes in the folders of one user, and how they are taken away.

A file is ours by the folder that it lies in and by a name that the program gives there; of the
demo model also by the card that comes with it. Links and folders under such a name are somebody
else's, since the program makes none, and behind a link nothing is ours.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from veloxquant.config.folders import Folders
from veloxquant.config.method_names import METHOD_NAMES
from veloxquant.integration import demo_model
from veloxquant.supervisor.paths import Paths

_NUMBER = r"-?\d+"
_PLAIN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}"
_TIME = r"\d{8}-\d{6}"
_KEY = r"[0-9a-f]{24}"


def _whole(*names: str) -> tuple[str, ...]:
    """Patterns of files that `core.whole_files` writes: the file, and what a killed writer left."""
    return tuple(
        pattern
        for name in names
        for pattern in (name, rf"\.{name}\.(?:[A-Za-z0-9_-]+\.)?\d{{1,10}}\.\d+\.tmp")
    )


CONFIG = (*_whole(r"config\.toml"), r"config\.toml\.corrupt-\d+")
STATE = (
    *_whole(r"last_start\.json", r"journal\.json", "token"), r"journal\.json\.corrupt-\d+",
    r"supervisor\.lock", rf"chat-{_TIME}-[0-9a-f]{{6}}\.(?:jsonl|stop)",
)  # fmt: skip
RUN = (r"control\.sock",)
LOG = (
    r"supervisor\.log", r"server\.log(?:\.\d+)?", rf"log-{_TIME}\.txt", rf"layers-{_TIME}\.csv",
)  # fmt: skip
ARTIFACTS = _whole(
    rf"rotation_d{_NUMBER}_seed{_NUMBER}\.npy",
    rf"codebook_{_PLAIN}_b{_NUMBER}_d{_NUMBER}\.npy",
    rf"jl_d{_NUMBER}_m{_NUMBER}_seed{_NUMBER}\.npy",
)
CALIBRATION = _whole(rf"(?:{'|'.join((*METHOD_NAMES, 'ratequant'))})\.npz")
SPECTRAL = (rf"{_PLAIN}\.npz", rf"\.{_PLAIN}\.npz\.[a-z0-9_]{{8}}")
MODEL = tuple(re.escape(name) for name in (*demo_model.FILES, "README.md"))
SCRATCH = (
    re.escape(demo_model.REQUIREMENT.replace("-", "_").replace("==", "-"))
    + r"-[A-Za-z0-9_.-]*\.whl",
    re.escape(Path(demo_model.MEMBER).name),
)


@dataclass(frozen=True)
class OwnFolder:
    """A folder, patterns of the files that the program writes there, and folders it makes there."""

    names: tuple[str, ...] = ()
    inner: dict[str, "OwnFolder"] = field(default_factory=dict)
    """By pattern of the name."""
    is_ours: Callable[[Path], bool] = lambda _: True
    """Whether this one is a folder that the program made, if its name does not tell."""


def _has_card(folder: Path) -> bool:
    """Whether the program made a model: its card says so, word by word."""
    card = folder / "README.md"
    try:
        return not card.is_symlink() and card.read_bytes() == demo_model.CARD.encode()
    except OSError:
        return False


_DEMO = re.escape(demo_model.NAME)
_ARTIFACTS = OwnFolder(
    ARTIFACTS,
    {
        "calibration": OwnFolder(inner={_KEY: OwnFolder(CALIBRATION)}),
        "spectral": OwnFolder(SPECTRAL),
    },
)


def own_folders(found: Folders, paths: Paths, *, models: bool) -> list[tuple[Path, OwnFolder]]:
    """The folders of a user with what the program writes there, models only when asked for."""
    attempt = re.escape(demo_model.SCRATCH) + "[a-z0-9_]{8}"
    inner = {attempt: OwnFolder(SCRATCH, {_DEMO: OwnFolder(MODEL)})}
    if models:
        inner[_DEMO] = OwnFolder(MODEL, is_ours=_has_card)
    data = OwnFolder(inner={"artifacts": _ARTIFACTS, "models": OwnFolder(inner=inner)})
    return [
        (found.config, OwnFolder(CONFIG)),
        (found.data, data),
        (paths.run, OwnFolder(RUN)),
        (paths.log, OwnFolder(LOG)),
        (paths.state, OwnFolder(STATE)),
    ]


@dataclass
class Found:
    """What lies in the folders of a user."""

    files: list[Path] = field(default_factory=list)
    """Files of ours."""
    folders: list[Path] = field(default_factory=list)
    """Our folders, inner ones first."""
    spared: dict[Path, str] = field(default_factory=dict)
    """What has a name of ours and is left alone, and why."""


def find_own(top: list[tuple[Path, OwnFolder]], shared: Iterable[Path]) -> Found:
    """Look for what is ours; nothing is changed.

    Args:
        top: the folders.
        shared: what other programs use, too; it and what lies in it is never ours.
    """
    search = _Search(list(shared))
    every = {folder for folder, _ in top}
    for folder, own in top:
        # Outer ones of the same list: run and log may lie in the state folder.
        line = [*(outer for outer in folder.parents if outer in every), folder]
        if linked := [part for part in line if part.is_symlink()]:
            search.spare(linked[0])
        else:
            search.look(folder, own)
    found = search.found
    found.files = sorted(set(found.files))
    found.folders = sorted(set(found.folders), key=lambda path: (-len(path.parts), path))
    return found


class _Search:
    """Walks our folders, and no others."""

    def __init__(self, shared: list[Path]) -> None:
        self.found = Found()
        self._shared: list[os.stat_result] = []
        for path in shared:
            with suppress(OSError):
                self._shared.append(path.stat())

    def spare(self, path: Path) -> None:
        """Leave a link alone."""
        self.found.spared[path] = f"a link to {path.readlink()}, which nothing was removed behind"

    def look(self, folder: Path, own: OwnFolder) -> None:
        """Find what is ours in a folder that is no link."""
        if not folder.is_dir():
            return
        if self._is_shared(folder):
            self.found.spared[folder] = "in the cache of Hugging Face, which others use"
            return
        if not own.is_ours(folder):
            self.found.spared[folder] = "its card is not that of `vq models demo`"
            return
        self.found.folders.append(folder)
        for path in _entries(folder):
            self._take(path, own)

    def _take(self, path: Path, own: OwnFolder) -> None:
        is_named = any(re.fullmatch(name, path.name) for name in own.names)
        inner = next((o for name, o in own.inner.items() if re.fullmatch(name, path.name)), None)
        if not is_named and inner is None:
            return
        if path.is_symlink():
            self.spare(path)
        elif inner is not None:
            self.look(path, inner)
        elif _is_file(path) and not self._is_shared(path):
            self.found.files.append(path)

    def _is_shared(self, path: Path) -> bool:
        """Whether others use a path or what it lies in, by whatever name or link."""
        real = path.resolve()
        for part in (real, *real.parents):
            with suppress(OSError):
                here = part.stat()
                if any(os.path.samestat(here, there) for there in self._shared):
                    return True
        return False


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # not to be read, so not to be emptied either
        return []


def _is_file(path: Path) -> bool:
    """Whether it is a file or a socket."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def left(found: Found) -> list[Path]:
    """What is still in our folders and is no folder of ours, and what was spared."""
    ours = set(found.folders)
    inside = {path for folder in ours for path in _entries(folder) if path not in ours}
    return sorted(inside | {path for path in found.spared if os.path.lexists(path)})
