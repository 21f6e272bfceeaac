"""The kernel's own tests under AddressSanitizer and UndefinedBehaviorSanitizer.

MLX's buffers come from malloc, which AddressSanitizer replaces, so that a read past the end of a
packed buffer is found too. The slow run also counts calls: no function may go unwatched.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SOURCES = sorted((ROOT / "kernels").glob("*.c"))
WATCHED = [str(HERE / f"test_{name}.py") for name in ("agreement", "encode", "native")]


def sanitizer_runtime() -> str | None:
    """Path of the compiler's AddressSanitizer library, None without one."""
    compiler = shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return found if "/" in found and Path(found).exists() else None


def built(folder: Path, *options: str) -> Path:
    """The kernel with both sanitizers."""
    library = folder / "_packed_sanitized.so"
    subprocess.run(
        [
            "gcc", "-O1", "-g", "-std=gnu11", "-fPIC", "-shared", "-DVQ_ONE_VARIANT",
            "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", *options,
            *map(str, SOURCES), "-o", str(library), "-lm", "-lpthread",
        ],
        cwd=folder, check=True,
    )  # fmt: skip
    return library


def run_watched(library: Path, *selection: str, seconds: int) -> None:
    """Run the kernel's tests with this build; any finding ends the process."""
    environment = os.environ | {
        "LD_PRELOAD": str(sanitizer_runtime()),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "VELOXQUANT_NATIVE": str(library),
        "PYTHONMALLOC": "malloc",
    }
    ran = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:randomly"),
            *("-p", "no:cacheprovider", "-m", "not slow", "--timeout", str(seconds)),
            *(*WATCHED, *selection),
        ],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert re.search(r"\b[1-9]\d+ passed", ran.stdout), ran.stdout


def functions_that_ran(folder: Path) -> dict[str, bool]:
    """Functions that the kernel exports, and whether each was called."""
    counts = "\n".join(
        subprocess.run(
            ["gcov", "--stdout", str(path)], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
        for path in folder.glob("*.gcda")
    )
    exported = [
        name
        for source in SOURCES
        for name in re.findall(r"^int (vq_\w+)\(", source.read_text(), re.MULTILINE)
    ]
    return {
        name: re.search(rf"^ +[1-9]\d*\*?: +\d+:int {name}\(", counts, re.MULTILINE) is not None
        for name in exported
    }


needs_sanitizer = pytest.mark.skipif(
    sanitizer_runtime() is None, reason="needs gcc with AddressSanitizer"
)


@needs_sanitizer
@pytest.mark.timeout(300)
def test_no_finding_under_sanitizers(tmp_path):
    # Long runs and random shapes are left to the test below: the formats are all here.
    few = "not 4096 and not 1000 and not any_mix"
    run_watched(built(tmp_path, "-march=native"), "-k", few, seconds=250)


@pytest.mark.slow
@needs_sanitizer
@pytest.mark.skipif(shutil.which("gcov") is None, reason="needs gcov")
@pytest.mark.timeout(600)
def test_no_finding_under_sanitizers_in_long_runs_and_every_function_is_called(tmp_path):
    run_watched(built(tmp_path, "--coverage", "-fprofile-update=atomic"), seconds=500)
    called = functions_that_ran(tmp_path)
    assert called.keys() >= {"vq_attend", "vq_decode", "vq_encode_affine", "vq_encode_rotated"}
    assert all(called.values()), called
