"""Memory for a model on this machine now, with the arithmetic that leads to it.

room = min(GPU cap, RAM - used by others - kept free). On macOS *used* is app + wired + compressed
memory, the sum that Activity Monitor shows; elsewhere it is what cannot be handed out.
"""

import contextlib
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from veloxquant.planning.model_shape import Backend

GIB = 1 << 30
CPU_SHARE = 0.75
"""Share of RAM that a worker on the CPU backend may use unless told otherwise."""
SMALL_MAC = 36 * GIB
"""Up to this much RAM Metal's default working set is two thirds of it, above it three quarters."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes. `used` is memory of others: what runs now less what the model's own server holds."""

    total: int
    used: int
    keep_free: int
    cap: int
    cap_source: str

    @property
    def nbytes(self) -> int:
        """What a model may take; never below zero."""
        return max(0, min(self.cap, self.total - self.used - self.keep_free))

    @property
    def limited_by(self) -> str:
        """The term that decides."""
        return "cap" if self.cap <= self.total - self.used - self.keep_free else "memory in use"

    def describe(self) -> str:
        """The arithmetic in one line."""
        return (
            f"room {_gib(self.nbytes)} = {_gib(self.total)} - {_gib(self.used)} in use "
            f"- {_gib(self.keep_free)} kept free ({self.cap_source} {_gib(self.cap)})"
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"


def this_backend() -> Backend:
    """Where MLX computes on this machine."""
    metal = sys.platform == "darwin" and platform.machine() == "arm64"
    return "metal" if metal else "cpu"


def default_keep_free(total: int) -> int:
    """Memory left to the system: one eighth, at least 1 and at most 8 GiB."""
    return min(8 * GIB, max(GIB, total // 8))


def measure_room(*, keep_free: int | None = None, own: int = 0) -> Room:
    """Room on this machine now.

    Args:
        keep_free: bytes to leave to the system; one eighth of RAM by default.
        own: bytes of a running server that the model would replace.
    """
    memory = psutil.virtual_memory()
    total, used = memory.total, memory.total - memory.available
    if sys.platform == "darwin":
        used = _used_on_mac() or used
        cap, source = _metal_cap(total), "GPU cap"
    else:
        total, used = _within_container(total, used)
        cap, source = int(CPU_SHARE * total), "cap of 75 %"
    if keep_free is None:
        keep_free = default_keep_free(total)
    return Room(total, max(0, used - own), keep_free, cap, source)


def assumed_room(nbytes: int) -> Room:
    """A room that the user named, whatever this machine has."""
    return Room(nbytes, 0, 0, nbytes, "as given:")


# ---- macOS ----------------------------------------------------------------------------------


def parse_vm_stat(text: str) -> int | None:
    """App + wired + compressed bytes from the output of `vm_stat`; None when it is another text."""
    page = re.search(r"page size of (\d+) bytes", text)
    pages = {
        name.strip().strip('"'): int(count)
        for name, count in re.findall(r"^(.+?):\s+(\d+)\.?$", text, re.MULTILINE)
    }
    try:
        app = pages["Anonymous pages"] - pages.get("Pages purgeable", 0)
        held = app + pages["Pages wired down"] + pages["Pages occupied by compressor"]
    except KeyError:
        return None
    return held * int(page[1]) if page else None


def metal_cap(total: int, wired_limit_mb: int) -> int:
    """Metal's recommended working set: the limit that was set, else a share of RAM."""
    if wired_limit_mb > 0:
        return min(total, wired_limit_mb << 20)
    return total * 2 // 3 if total <= SMALL_MAC else total * 3 // 4


def _metal_cap(total: int) -> int:
    limit = _output("sysctl", "-n", "iogpu.wired_limit_mb").strip()
    return metal_cap(total, int(limit) if limit.isdigit() else 0)


def _used_on_mac() -> int | None:
    return parse_vm_stat(_output("vm_stat"))


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


# ---- Linux ----------------------------------------------------------------------------------


def _within_container(
    total: int, used: int, group: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """RAM and use of a container with a limit; cached files that can be dropped do not count."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())
        current = int((group / "memory.current").read_text())
        files = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.M)
        if limit < total:
            return limit, max(0, current - (int(files[1]) if files else 0))
    return total, used
