"""Find the models on this machine: Hugging Face cache, the program's own folder, added folders.

One bad folder is a row or a warning, never an error; links are followed; nothing is downloaded.
"""

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from veloxquant.config.folders import folders
from veloxquant.planning import model_files
from veloxquant.planning.model_files import ModelFilesError

Origin = Literal["own", "hub", "folder"]
MAX_ENTRIES = 2000
"""Sub-folders looked at per root; a home folder added by mistake must not hang the list."""


class ModelNotFoundError(LookupError):
    """Raised when no model on this machine has the name asked for."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One model folder. `runnable` means complete *and* loadable; `why` says what is missing."""

    name: str
    path: Path
    origin: Origin
    runnable: bool
    why: str
    model_type: str
    params: int | None
    quant: str
    weight_bytes: int
    disk_bytes: int
    modified: float
    chat_template: bool
    license: str
    revision: str = ""


@dataclass(frozen=True, slots=True)
class Root:
    """A folder to search."""

    path: Path
    origin: Origin


@dataclass(slots=True)
class Scan:
    """What a search found, what it could not read, and where it looked."""

    models: list[LocalModel] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    looked_in: list[Root] = field(default_factory=list)


def printable(name: str) -> str:
    """A file name as valid Unicode: bytes that are none become question marks."""
    return os.fsencode(name).decode("utf-8", "replace")


def model_roots(extra: Sequence[str | Path] = ()) -> list[Root]:
    """The folders to search, the program's own first; `extra` are added by the user."""
    from huggingface_hub import constants  # resolves HF_HUB_CACHE, HF_HOME and the rest

    return [
        Root(folders().models, "own"),
        Root(Path(constants.HF_HUB_CACHE), "hub"),
        *(Root(Path(path).expanduser(), "folder") for path in extra),
    ]


def scan_models(roots: Sequence[Root] | None = None) -> Scan:
    """Every model below the roots, each real folder once, in the order of the roots."""
    scan, seen = Scan(), set()
    for root in model_roots() if roots is None else roots:
        scan.looked_in.append(root)
        if not _exists(root.path):
            if root.origin == "folder":
                scan.warnings.append(f"{printable(str(root.path))} is not there")
            continue
        for name, folder, repo in _candidates(root, scan):
            real = Path(os.path.realpath(folder))
            if real not in seen:
                seen.add(real)
                scan.models.append(_describe(name, folder, root.origin, repo))
    return scan


def find_model(name: str, models: Sequence[LocalModel] | None = None) -> LocalModel:
    """The model with this name, last part of a name, or folder.

    Raises:
        ModelNotFoundError: when there is none, or several end in that name.
    """
    if models is None:
        models = scan_models().models
    for model in models:
        if model.name == name:
            return model
    short = [m for m in models if m.name.lower().rpartition("/")[2] == name.lower()]
    if len(short) == 1:
        return short[0]
    if short:
        raise ModelNotFoundError(f"{name!r} could be {' or '.join(m.name for m in short)}")
    if name.startswith(("/", "./", "../", "~")):
        path = Path(name).expanduser()
        if path.is_dir():
            return _describe(printable(path.resolve().name), path.resolve(), "folder", None)
    near = difflib.get_close_matches(name, [m.name for m in models], n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ModelNotFoundError(f"no model {name!r} on this machine{hint}")


def _exists(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _children(folder: Path, scan: Scan) -> list[Path]:
    """Visible sub-folders by name; an unreadable folder is a warning."""
    found: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not _is_dir(entry):
                    continue
                found.append(Path(entry.path))
                if len(found) >= MAX_ENTRIES:
                    scan.warnings.append(
                        f"{printable(str(folder))} has more than {MAX_ENTRIES} folders; "
                        f"the rest was not searched"
                    )
                    break
    except OSError as error:
        scan.warnings.append(f"{printable(str(folder))} cannot be read: {error.strerror}")
    return sorted(found)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _candidates(root: Root, scan: Scan) -> Iterator[tuple[str, Path, Path | None]]:
    """(name, model folder, repository folder of the cache) below one root."""
    if _is_model(root.path):
        yield printable(root.path.name), root.path, None
        return
    for child in _children(root.path, scan):
        if child.name.startswith("models--"):
            if snapshot := _snapshot(child, scan):
                name = printable(child.name.removeprefix("models--").replace("--", "/"))
                yield name, snapshot, child
        elif root.origin == "hub":
            continue  # datasets, spaces, locks
        elif _is_model(child):
            yield printable(child.name), child, None
        else:  # folders by organisation, as LM Studio makes them
            for inner in _children(child, scan):
                if _is_model(inner):
                    yield printable(f"{child.name}/{inner.name}"), inner, None


def _is_model(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file() or any(folder.glob("model*.safetensors"))
    except OSError:
        return False


def _snapshot(repo: Path, scan: Scan) -> Path | None:
    """The revision that `main` points at, else the newest; None when there is none."""
    snapshots = {path.name: path for path in _children(repo / "snapshots", scan)}
    if not snapshots:
        return None
    try:
        main = (repo / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        main = ""
    return snapshots.get(main) or max(snapshots.values(), key=_modified)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(folder: Path) -> tuple[int, float]:
    """Bytes and newest change of the files in a folder; links count as their targets."""
    total, newest, seen = 0, _modified(folder), set()
    for base, _, names in os.walk(folder, followlinks=False):
        for name in names:
            try:
                state = os.stat(os.path.join(base, name))  # noqa: PTH116, PTH118 - many files
            except OSError:
                continue
            if (key := (state.st_dev, state.st_ino)) not in seen:
                seen.add(key)
                total += state.st_size
                newest = max(newest, state.st_mtime)
    return total, newest


def _describe(name: str, folder: Path, origin: Origin, repo: Path | None) -> LocalModel:
    kind, why, weights = "", "", None
    try:
        config, weights = model_files.inspect(folder)
        kind = str(config.get("model_type", ""))
    except ModelFilesError as error:
        why = str(error)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        why = f"cannot be read: {error}"  # foreign files may hold anything
    disk, modified = _size(repo / "blobs" if repo and (repo / "blobs").is_dir() else folder)
    return LocalModel(
        name=name,
        path=folder,
        origin=origin,
        runnable=not why,
        why=why,
        model_type=kind,
        params=weights.params if weights else None,
        quant=weights.quant if weights else "-",
        weight_bytes=weights.nbytes if weights else 0,
        disk_bytes=disk,
        modified=modified,
        chat_template=model_files.has_chat_template(folder),
        license=model_files.license_of(folder),
        revision=folder.name if repo else "",
    )
