"""The entry for people: what `make` says while it sets up, and that it takes itself away again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
START = "from veloxquant.supervisor.launch import ensure_running; ensure_running()"
TALKATIVE_PIP = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/said"
case "$*" in
  *-qq*) ;;
  *) echo "WARNING: of pip" >&2;;
esac
[ "$PYTHONWARNINGS" = ignore ] || echo "BuildBackendWarning" >&2
case "$*" in *"-e ."*) [ ! -e broken ] || { echo "ERROR: no such package" >&2; exit 1; };; esac
"""


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source folder with the real Makefile and a `vq` that is this one."""
    folder = tmp_path / "tree"
    (folder / "kernels").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "kernels/packed_attention.c", "kernels/packed_encode.c"):
        (folder / name).touch()
    script(folder / ".venv/bin/vq", f'#!/bin/sh\nexec {sys.executable} -P -m veloxquant "$@"\n')
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home of its own in the platform's own places."""
    others = ("XDG_", "VELOXQUANT_", "HF_", "MAKE", "MFLAGS")  # `make test` sets the last two
    kept = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    home = tmp_path / "home"
    home.mkdir()
    return kept | {"HOME": str(home)}


def make(tree: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *words], cwd=tree, env=environment, capture_output=True, text=True, timeout=50
    )


def test_setting_up_is_quiet_but_tells_errors(tree: Path, environment: dict[str, str]) -> None:
    script(tree / "stub/python3", "#!/bin/sh\nexit 0\n")
    script(tree / ".venv/bin/python", TALKATIVE_PIP)
    done = make(tree, environment, "setup", f"PYTHON={tree}/stub/python3")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1, done.stdout
    assert "install" in (tree / ".venv/bin/said").read_text()
    (tree / "broken").touch()
    (tree / ".venv/.ready").unlink()
    done = make(tree, environment, "setup", f"PYTHON={tree}/stub/python3")
    assert done.returncode != 0
    assert "ERROR: no such package" in done.stderr


def test_uninstall_takes_all_but_sources_and_models(
    tree: Path, environment: dict[str, str]
) -> None:
    home = Path(environment["HOME"])
    hub = home / ".cache" / "huggingface" / "hub"
    for folder in (hub, tree / "build", tree / "x.egg-info", tree / "kernels" / "__pycache__"):
        folder.mkdir(parents=True)
    (tree / "kernels" / "_packed.so").touch()
    subprocess.run([sys.executable, "-P", "-c", START], env=environment, check=True, timeout=30)
    vq = [str(tree / ".venv/bin/vq"), "config", "set", "server.port", "8111"]
    subprocess.run(vq, env=environment, check=True, timeout=30, stdout=subprocess.DEVNULL)
    script_ = "from veloxquant.config.folders import folders; print(folders().models)"
    words = [sys.executable, "-P", "-c", script_]
    models = Path(subprocess.check_output(words, env=environment, text=True).strip())
    (models / "Mine").mkdir(parents=True)
    done = make(tree, environment, "uninstall")
    assert done.returncode == 0, done.stderr
    for told in ("removed .venv", "removed build", "config.toml", "supervisor.lock"):
        assert told in done.stdout
    assert done.stdout.count(f"kept {models / 'Mine'}") == 1
    left = {str(path.relative_to(tree)) for path in tree.rglob("*")}
    assert left == {"Makefile", "pyproject.toml", "kernels", "kernels/packed_attention.c",
                    "kernels/packed_encode.c"}  # fmt: skip
    ours = [path for path in home.rglob("*") if path.name == "veloxquant"]
    assert ours == [models.parent], "settings and state are gone, and the supervisor with them"
    again = make(tree, environment, "uninstall", "MODELS=1")
    assert (again.returncode, models.exists()) == (0, True), "without .venv there is nothing to ask"
    vq_ = f'#!/bin/sh\nexec {sys.executable} -P -m veloxquant "$@"\n'
    script(tree / ".venv/bin/vq", vq_)
    assert f"kept {models / 'Mine'}" in make(tree, environment, "uninstall", "MODELS=1").stdout
    (models / "Mine").rmdir()
    script(tree / ".venv/bin/vq", vq_)
    assert make(tree, environment, "uninstall", "MODELS=1").returncode == 0
    assert not models.parent.exists()
    assert hub.is_dir()
