import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from veloxquant.artifacts import NpyArtifactStore
from veloxquant.cache.calibration import user_store
from veloxquant.cli import exit_codes
from veloxquant.config.folders import folders
from veloxquant.config.last_start import save_last
from veloxquant.panel import transcript
from veloxquant.panel.export import export_layers, export_lines
from veloxquant.panel.state import LogLine
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
    (folders().models / ".demo-abc").mkdir(parents=True)
    for half in (folders().config / ".config.toml.here.1.0.tmp", paths.state / ".journal.json.77"):
        half.write_text("half")


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
    models = {name for name in files(home) if name.startswith("data/models/Tiny-1B")}
    code, out, err = run("uninstall")
    assert (code, err) == (0, "")
    assert daemon.wait() == 0
    assert files(home) == models
    told = {line.removeprefix("removed ") for line in out.splitlines() if "removed" in line}
    assert str(home / "config" / "config.toml") in told
    assert str(home / "data" / "artifacts") in told
    assert not any(Path(path).exists() for path in told)
    assert out.endswith(f"kept {demo}\n")
    assert run("uninstall", "--models")[0] == 0
    assert not home.exists()
    assert run("uninstall")[:2] == (0, "nothing to remove\n")


def test_what_the_program_did_not_make_stays_and_is_named(run: Run, home: Path) -> None:
    live(run)
    mine = [home / "config" / "config.toml.bak", home / "state" / "notes.txt", home / "data" / "x"]
    for path in mine:
        path.write_text("mine")
    data = json.loads(run("uninstall", "--models", "--json")[1])["data"]
    assert data["kept"] == sorted(map(str, mine))
    assert files(home) == {str(path.relative_to(home)) for path in mine}


def test_the_hub_cache_and_what_links_point_at_stay(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = folders().models
    hub, elsewhere = models / "hub", tmp_path / "elsewhere"
    for folder in (hub, elsewhere, models / "Mine"):
        folder.mkdir(parents=True)
        (folder / "weights").write_text("w")
    (models / "Linked").symlink_to(elsewhere)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    assert run("uninstall", "--models")[0] == 0
    assert [path.name for path in models.iterdir()] == ["hub"]
    assert (hub / "weights").exists()
    assert (elsewhere / "weights").exists()


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
