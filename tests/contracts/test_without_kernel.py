"""Methods keep their contract where the compiled kernel is switched off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)
def test_contracts_hold_with_the_kernel_switched_off() -> None:
    code = (
        "import sys, pytest\n"
        "from veloxquant.core.blas import preload_openblas\n"
        "preload_openblas()\n"
        "from veloxquant.kernels import native\n"
        "assert native.library() is None\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    ran = subprocess.run(
        [
            *(sys.executable, "-P", "-c", code, "-q", "-p", "no:cacheprovider"),
            *("-p", "no:randomly", "-m", "not slow", "-k", "kivi or turboquant_rvq"),
            *("--timeout", "100", str(Path(__file__).with_name("test_registry.py"))),
        ],
        cwd=ROOT, env=os.environ | {"VELOXQUANT_NATIVE": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert " passed" in ran.stdout
