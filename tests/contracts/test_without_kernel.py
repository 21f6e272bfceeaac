"""Every row answers alike where the compiled kernel is switched off."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import KEEPING, READY, feed, new_cache, random_tokens, shape_of, small_config

from veloxquant.cache.table import MethodRow
from veloxquant.kernels import native

ROOT = Path(__file__).parents[2]
STEPS = 3
LATE = {"palu": 516, "xkv": 516}
"""Prompts of methods that code their first tokens late."""
RUN = """
import importlib.util, sys
from pathlib import Path
from veloxquant.core.blas import preload_openblas
preload_openblas()
for path in map(Path, sys.argv[2:]):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
assert module.native.library() is None
module.np.savez(sys.argv[1], **module.every_answer())
"""


def answers(row: MethodRow) -> np.ndarray:
    """Outputs of a prompt, of a few single steps, and of several queries at once."""
    length = LATE.get(row.name, 324) if row in KEEPING else 90
    tokens = random_tokens(length + STEPS + 5, seed=40)
    cache = new_cache(small_config(row), shape_of(tokens))
    parts = [feed(cache, tokens.cut(0, length), 162)]
    parts += [feed(cache, tokens.cut(length, length + STEPS), 1)]
    parts += [feed(cache, tokens.cut(length + STEPS, tokens.length))]
    return np.array(mx.concatenate(parts, axis=2))


def every_answer() -> dict[str, np.ndarray]:
    """`answers` of every row."""
    return {row.name: answers(row) for row in READY}


@pytest.mark.timeout(120)
def test_every_row_answers_alike_without_the_kernel(tmp_path: Path) -> None:
    if native.library() is None:
        pytest.skip("the kernel was not built")
    file = tmp_path / "answers.npz"
    lab = ROOT / "tests" / "cache_lab.py"
    running = subprocess.Popen(
        [sys.executable, "-P", "-c", RUN, str(file), str(lab), str(Path(__file__))],
        cwd=ROOT, env=os.environ | {"VELOXQUANT_NATIVE": "0"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with_kernel = every_answer()
    _, told = running.communicate(timeout=110)
    assert running.returncode == 0, told[-4000:]
    without = np.load(file)
    assert sorted(without.files) == sorted(with_kernel)
    apart = {
        name: float(np.abs(without[name] - found).max() / np.abs(found).max())
        for name, found in with_kernel.items()
    }
    assert {name: by for name, by in apart.items() if not by < 2e-5} == {}
