"""The kernel's own tests under AddressSanitizer and UndefinedBehaviorSanitizer.

MLX's buffers come from malloc, which AddressSanitizer replaces, so that a read past the end of a
packed buffer is found too.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "kernels").glob("*.c"))


def sanitizer_runtime() -> str | None:
    """Path of the compiler's AddressSanitizer library, None without one."""
    compiler = shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return found if "/" in found and Path(found).exists() else None


@pytest.mark.skipif(sanitizer_runtime() is None, reason="needs gcc with AddressSanitizer")
@pytest.mark.timeout(300)
def test_no_finding_under_sanitizers(tmp_path):
    library = tmp_path / "_packed_sanitized.so"
    subprocess.run(
        [
            "gcc", "-O1", "-g", "-std=c11", "-fPIC", "-shared", "-DVQ_NO_CLONES",
            "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
            *map(str, SOURCES), "-o", str(library), "-lm", "-lpthread",
        ],
        check=True,
    )  # fmt: skip
    environment = os.environ | {
        "LD_PRELOAD": str(sanitizer_runtime()),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "VELOXQUANT_NATIVE": str(library),
        "PYTHONMALLOC": "malloc",
    }
    ran = subprocess.run(
        [
            sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:randomly",
            "-p", "no:cacheprovider", "--timeout", "250",
            str(Path(__file__).with_name("test_native.py")),
            "-k", "format_agree or anywhere or tight or room or encoders",
        ],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert " passed" in ran.stdout
