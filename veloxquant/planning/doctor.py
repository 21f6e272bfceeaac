"""Checks of this machine: each says what is, and what to do when it is not right."""

import ctypes.util
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from veloxquant.planning.models import Scan
from veloxquant.planning.room import Room

LIBRARIES = {"mlx": ((0, 32), (0, 33)), "mlx-lm": ((0, 32), (0, 33))}
"""Tested versions: from the first on, below the second."""
OPENBLAS_HINT = (
    "Install it (Debian, Ubuntu: apt install libopenblas0-pthread; Fedora: dnf install openblas; "
    "Arch: pacman -S openblas)."
)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `hint` is the next step when it is not ok."""

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str
    hint: str = ""


def check_machine() -> Check:
    """Platform, processor, memory-independent."""
    name = platform.machine()
    if sys.platform == "darwin" and name == "arm64":
        return Check("machine", "ok", f"Apple silicon, macOS {platform.mac_ver()[0]}, Metal")
    if sys.platform == "linux" and name in ("x86_64", "aarch64"):
        cores = os.cpu_count() or 1
        return Check("machine", "ok", f"Linux {name}, {cores} cores, CPU backend of MLX")
    return Check(
        "machine",
        "fail",
        f"{platform.system()} on {name} is not supported",
        "MLX runs on Apple silicon, and on Linux with x86_64 or aarch64 (CPU).",
    )


def check_python() -> Check:
    """Version of Python."""
    version = platform.python_version()
    return Check("python", "ok", f"Python {version}")


def check_libraries() -> list[Check]:
    """MLX and mlx-lm, from their metadata; nothing is imported."""
    out = []
    for name, (low, high) in LIBRARIES.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out.append(Check(name, "fail", f"{name} is not installed", f"pip install {name}"))
            continue
        number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if low <= number < high:
            out.append(Check(name, "ok", f"{name} {version} (inside the tested range)"))
        else:
            wanted = f"{name}>={low[0]}.{low[1]},<{high[0]}.{high[1]}"
            out.append(
                Check(name, "warn", f"{name} {version} is outside the tested range",
                      f"pip install '{wanted}'")
            )  # fmt: skip
    return out


def check_blas() -> list[Check]:
    """OpenBLAS, which makes the CPU backend fast on Linux."""
    if sys.platform != "linux":
        return []
    if ctypes.util.find_library("openblas"):
        return [Check("openblas", "ok", "OpenBLAS is there; prompts are read at full speed")]
    return [
        Check("openblas", "warn", "OpenBLAS is missing: prompts are read 20 times slower",
              OPENBLAS_HINT)
    ]  # fmt: skip


def check_kernel() -> list[Check]:
    """The compiled kernel of the CPU backend; on a Mac MLX uses the GPU."""
    if sys.platform == "darwin":
        return []
    if os.environ.get("VELOXQUANT_NATIVE") == "0":
        return [
            Check("kernel", "warn", "compiled CPU kernel is off: packed caches work, slower",
                  "Unset VELOXQUANT_NATIVE.")
        ]  # fmt: skip
    folder = Path(__file__).resolve().parents[1] / "kernels"
    if any(folder.glob("_packed*.so")):
        return [
            Check("kernel", "ok", "compiled CPU kernel is there; packed caches run at full speed")
        ]
    return [
        Check("kernel", "warn", "compiled CPU kernel is missing: packed caches work, slower",
              "Install a C compiler, then install VeloxQuant again.")
    ]  # fmt: skip


def check_memory(room: Room) -> Check:
    """Room for a model now."""
    if room.nbytes < 1 << 30:
        return Check("memory", "warn", room.describe(), "Close other programs before a start.")
    return Check("memory", "ok", room.describe())


def check_models(scan: Scan) -> list[Check]:
    """Models found, and folders that could not be read."""
    out = [
        Check("folder", "warn", text, "Correct its permissions or take it out of the settings.")
        for text in scan.warnings
    ]
    runnable = [model for model in scan.models if model.runnable]
    if runnable:
        size = sum(model.disk_bytes for model in scan.models) / (1 << 30)
        more = len(scan.models) - len(runnable)
        rest = f", {more} that cannot run" if more else ""
        text = f"{len(runnable)} model{'s' * (len(runnable) != 1)} ready{rest}, {size:.1f} GiB"
        out.append(Check("models", "ok", text))
    else:
        out.append(
            Check("models", "warn", "no model that can run was found",
                  "`vq models demo` fetches a small one (89 MiB).")
        )  # fmt: skip
    return out


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):
            return False
    return True


def check_port(host: str, port: int) -> Check:
    """Whether the port that `vq up` would use is free."""
    if is_free(host, port):
        return Check("port", "ok", f"port {port} is free")
    following = range(port + 1, min(port + 100, 65536))
    other = next((n for n in following if is_free(host, n)), None)
    hint = f"`vq up --port {other}`" if other else "Choose another with `vq up --port N`."
    return Check("port", "warn", f"port {port} is taken", hint)


def check_terminal() -> Check:
    """What the panel can draw here."""
    size = shutil.get_terminal_size()
    term = os.environ.get("TERM", "")
    if not sys.stdout.isatty():
        return Check("terminal", "ok", "not a terminal: plain output")
    if term in ("", "dumb"):
        return Check("terminal", "warn", "this terminal cannot draw", "Use the commands.")
    colours = "true colour" if os.environ.get("COLORTERM") in ("truecolor", "24bit") else term
    text = f"terminal {size.columns}x{size.lines}, {colours}"
    if size.columns < 80 or size.lines < 24:
        return Check("terminal", "warn", text, "The panel shows everything from 80x24 on.")
    return Check("terminal", "ok", text)


def check_all(room: Room, scan: Scan, host: str, port: int) -> Sequence[Check]:
    """Every check that needs no supervisor, in the order they are shown."""
    return [
        check_machine(),
        check_python(),
        *check_libraries(),
        *check_blas(),
        *check_kernel(),
        check_memory(room),
        *check_models(scan),
        check_port(host, port),
    ]
