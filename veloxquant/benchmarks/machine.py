"""What was measured on: class of machine and versions, without names or paths."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

PACKAGES = ("veloxquant", "mlx", "mlx-lm")


def describe(blas: str | None) -> dict[str, str]:
    """Date, processor, cores, memory, versions and BLAS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total / 2**30
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor(),
        "cores": str(cores),
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "versions": f"Python {platform.python_version()}, {versions}",
        "blas": blas or "as shipped with MLX",
        "load": " ".join(f"{x:.1f}" for x in os.getloadavg()),
    }


def processor() -> str:
    """The family of the processor, as its maker names it."""
    if sys.platform == "darwin":
        asked = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
        return asked.stdout.strip() or platform.machine()
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for row in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = row.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()
