import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from veloxquant.config.folders import folders
from veloxquant.worker.faults import WorkerFault
from veloxquant.worker.gate import open_gate


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "weights cut short": (lambda m: cut(m / "model.safetensors"), "bad_model", "model.safetensors"),
    "empty weights": (
        lambda m: (m / "model.safetensors").write_bytes(b""),
        "bad_model",
        "model.safetensors",
    ),
    "header of 2^63 bytes": (
        lambda m: (m / "model.safetensors").write_bytes(b"\xff" * 7 + b"\x7f" + b"{}" * 50),
        "bad_model",
        "model.safetensors",
    ),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "bad_model", "safetensors"),
    "no configuration": (lambda m: (m / "config.json").unlink(), "bad_model", "config.json"),
    "configuration is no JSON": (
        lambda m: (m / "config.json").write_text("[" * 200_000),
        "bad_model",
        "config.json",
    ),
    "no tokenizer": (
        lambda m: [(m / f).unlink() for f in ("tokenizer.json", "tokenizer_config.json")],
        "bad_model",
        "tokenizer",
    ),
    "shard missing": (
        lambda m: (m / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}})
        ),
        "bad_model",
        "model-00002-of-00002.safetensors",
    ),
    "own code": (
        lambda m: edit(m / "config.json", auto_map={"AutoModel": "x.Model"}),
        "unsupported",
        "auto_map",
    ),
    "own model file": (
        lambda m: edit(m / "config.json", model_file="evil.py"),
        "unsupported",
        "model_file",
    ),
    "own tokenizer code": (
        lambda m: edit(m / "tokenizer_config.json", auto_map={"AutoTokenizer": "x.T"}),
        "unsupported",
        "tokenizer_config.json",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_refused_by_name(case: str, tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    damage, code, named = BROKEN[case]
    damage(model)
    with pytest.raises(WorkerFault) as fault:
        open_gate(str(model))
    assert fault.value.code == code
    assert named in fault.value.detail


@pytest.mark.parametrize(
    "name",
    ["/no/such/folder", "./nowhere", "../../etc", "a/../b", "no-such/model", "x y", "", "a/b/c"],
)
def test_a_model_that_is_not_here_is_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VELOXQUANT_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(WorkerFault) as fault:
        open_gate(name)
    assert fault.value.code == "model_missing"


def test_a_good_model_passes_with_its_sizes(tiny: Path) -> None:
    gated = open_gate(str(tiny))
    assert gated.model_id == "tiny"
    assert gated.config["model_type"] == "llama"
    assert gated.file_bytes == gated.loaded_bytes(as_float32=True)  # it is stored in 32 bits
    assert open_gate(str(tiny), "mine").model_id == "mine"


def test_a_name_finds_the_users_own_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VELOXQUANT_HOME", str(tmp_path))
    shutil.copytree(tiny, folders().models / "mine")
    assert open_gate("mine").path == (folders().models / "mine").resolve()
