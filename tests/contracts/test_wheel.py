"""The wheel works where it is installed: with a C compiler at build time and without.

Everything happens offline: the build sees the tools of this environment, and the fresh environment
sees its libraries through a path file, which leaves the editable install behind.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "veloxquant", "kernels", "panel", "supervisor",
           "worker")  # fmt: skip
SETUPTOOLS = 77

DECODE = """
import json, sys
import mlx.core as mx
import veloxquant
from veloxquant.cache.builder import build_layer
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.kernels import dispatch, native
from veloxquant.quantizers.sizes import LayerShape

outs = {}
shape = LayerShape(4, 2, 64, 64, 4)
for method in ("kivi", "turboquant_rvq"):
    more = {"residual_length": 32} if method == "kivi" else {}
    cache = build_layer(KVCacheConfig(method=method, **more), shape)
    cache.returns = "views"
    for length in (200, 1, 1):
        draws = mx.random.split(mx.random.key(length), 3)
        q, k, v = (
            mx.random.normal((1, heads, length, 64), key=key)
            for heads, key in zip((4, 2, 2), draws, strict=True)
        )
        mask = cache.make_mask(length)
        keys, values = cache.update_and_fetch(k, v)
        out = keys.attend(q, values, 64**-0.5, mask, None)
    outs[method] = out.reshape(-1).tolist()
print(json.dumps({
    "file": veloxquant.__file__,
    "compiled": native.library() is not None,
    "status": dispatch.status(),
    "outs": outs,
}))
"""


class Installed(NamedTuple):
    """A fresh environment with the wheel in it."""

    bin: Path
    home: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, away from the sources."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VELOXQUANT"))}
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.home, env=kept | {"VELOXQUANT_HOME": str(self.home / "state")},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def decoded(self) -> dict[str, Any]:
        """What a small decode with the installed package gives."""
        ran = self.run("python", "-W", "error", "-c", DECODE)
        assert ran.returncode == 0, ran.stderr
        found = json.loads(ran.stdout)
        assert Path(found["file"]).is_relative_to(self.bin.parent)
        return found

    def kernel_checks(self) -> list[dict[str, str]]:
        """What `vq doctor` says of the kernel."""
        ran = self.run("vq", "doctor", "--json")
        assert not ran.stderr, ran.stderr
        return [c for c in json.loads(ran.stdout)["data"]["checks"] if c["name"] == "kernel"]


def installed(folder: Path, **variables: str) -> Installed:
    """Build the wheel from a copy of the sources and install it into a fresh environment."""
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        here, there = ROOT / name, source / name
        if here.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(here, there, symlinks=True, ignore=ignore)
        else:
            shutil.copy(here, there)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    built = subprocess.run(
        [*pip, "wheel", *offline, "--no-build-isolation", "-w", str(folder), str(source)],
        env=os.environ | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    made = folder / "environment"
    venv.create(made, with_pip=False, symlinks=True)
    subprocess.run(
        [*pip[:3], "--python", str(made), *pip[3:], "install", *offline, str(wheel)], check=True
    )
    (packages,) = made.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(made / "bin", folder)


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    try:
        found = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        found = "0"
    if int(found.split(".")[0]) < SETUPTOOLS:
        pytest.skip(f"building offline needs setuptools {SETUPTOOLS} or newer, found {found}")
    return installed(tmp_path_factory.mktemp("without"), CC="/bin/false")


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has no use for the CPU kernel")
def test_a_wheel_built_without_a_compiler_decodes_and_doctor_says_so_once(
    without_compiler: Installed,
) -> None:
    found = without_compiler.decoded()
    assert not found["compiled"]
    assert "missing" in found["status"]
    assert set(found["outs"]) == {"kivi", "turboquant_rvq"}
    (check,) = without_compiler.kernel_checks()
    assert check["status"] == "warn"
    assert "C compiler" in check["hint"]
    told = without_compiler.run("vq", "doctor").stdout
    assert told.count("kernel is missing") == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has no use for the CPU kernel")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_wheel_built_with_a_compiler_decodes_alike(
    tmp_path: Path, without_compiler: Installed
) -> None:
    compiled = installed(tmp_path)
    found, plain = compiled.decoded(), without_compiler.decoded()
    assert found["compiled"]
    for method, out in found["outs"].items():
        assert out == pytest.approx(plain["outs"][method], abs=2e-2), method
    (check,) = compiled.kernel_checks()
    assert check["status"] == "ok"
