import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from veloxquant.planning.models import (
    LocalModel,
    ModelNotFoundError,
    Root,
    find_model,
    model_roots,
    scan_models,
)

Make = Callable[..., Path]


def scan(root: Path, origin: str = "folder") -> dict[str, LocalModel]:
    return {m.name: m for m in scan_models([Root(root, origin)]).models}  # type: ignore[arg-type]


def hub_repo(cache: Path, repo: str, make: Make, revision: str = "abc", **files: bytes) -> Path:
    """A repository of the Hugging Face cache, with links from snapshot to blobs as there."""
    base = cache / f"models--{repo.replace('/', '--')}"
    made = make(base / "plain", **files)
    snapshot = base / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (base / "blobs").mkdir(exist_ok=True)
    for file in made.iterdir():
        blob = base / "blobs" / f"{revision}-{file.name}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    made.rmdir()
    (base / "refs").mkdir(exist_ok=True)
    (base / "refs" / "main").write_text(revision)
    return base


def test_scan_of_missing_folders_is_empty(tmp_path: Path) -> None:
    found = scan_models([Root(tmp_path / "own", "own"), Root(tmp_path / "hub", "hub")])
    assert (found.models, found.warnings) == ([], [])


def test_scan_warns_about_a_missing_added_folder(tmp_path: Path) -> None:
    assert "is not there" in scan_models([Root(tmp_path / "gone", "folder")]).warnings[0]


def test_scan_finds_models_by_folder_and_by_organisation(tmp_path: Path, make_model: Make) -> None:
    make_model(tmp_path / "plain")
    make_model(tmp_path / "org" / "nested")
    make_model(tmp_path / ".demo-x" / "half")
    models = scan(tmp_path)
    assert set(models) == {"plain", "org/nested"}
    model = models["plain"]
    assert (model.runnable, model.why, model.chat_template) == (True, "", True)
    assert (model.params, model.quant, model.weight_bytes) == (32 * 64, "bf16", 4096)
    assert model.disk_bytes == sum(f.stat().st_size for f in model.path.iterdir())


def test_scan_reads_the_layout_of_the_hub_cache(tmp_path: Path, make_model: Make) -> None:
    base = hub_repo(tmp_path, "org/name--x", make_model, "old")
    hub_repo(tmp_path, "org/name--x", make_model, "new")
    (base / "refs" / "main").write_text("old")
    (tmp_path / "datasets--a--b" / "snapshots").mkdir(parents=True)
    (tmp_path / "models--empty--repo").mkdir()
    models = scan(tmp_path, "hub")
    assert list(models) == ["org/name/x"]
    assert models["org/name/x"].revision == "old"
    assert models["org/name/x"].runnable
    assert models["org/name/x"].disk_bytes > 2 * 4096  # both revisions are on the disk


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": b"{"}, "config.json is not valid JSON"),
        ({"config.json": b"[" * 100_000}, "config.json is not valid JSON"),
        ({"config.json": b"[1]"}, "not a JSON object"),
        ({"config.json": b"\xff\xfe\x00"}, "not valid JSON"),
        ({"config.json": None}, "has no config.json"),
        ({"config.json": b'{"model_type": "no_such_type"}'}, "'no_such_type' is unknown"),
        ({"config.json": b'{"model_type": "../base"}'}, "unknown to the installed mlx-lm"),
        ({"config.json": b'{"model_type": 3}'}, "names no model_type"),
        ({"config.json": b'{"model_type": "llama", "auto_map": {"a": "b"}}'}, "own Python code"),
        ({"tokenizer_config.json": b'{"auto_map": {"a": "b"}}'}, "own Python code"),
        ({"model.safetensors": b"\x10\0\0\0\0\0\0\0{}"}, "model.safetensors is"),
        ({"model.safetensors": None, "model.bin": b"x"}, ".bin files are not used"),
        ({"tokenizer.json": None, "tokenizer_config.json": None}, "has no tokenizer"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "model-2.safetensors"}}'},
         "1 of 1 weight files are missing (model-2.safetensors)"),
        ({"model.safetensors.index.json": b"[]"}, "not a JSON object"),
        ({"model.safetensors": None, "model-00001-of-00003.safetensors": b"x"},
         "2 of 3 weight files are missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_scan_says_why_a_model_does_not_run(
    tmp_path: Path, make_model: Make, files: dict[str, bytes | None], says: str
) -> None:
    make_model(tmp_path / "bad", **files)
    make_model(tmp_path / "good")
    models = scan(tmp_path)
    assert not models["bad"].runnable
    assert says in models["bad"].why
    assert models["good"].runnable


def test_scan_needs_no_index_for_several_files(
    tmp_path: Path, make_model: Make, weights: Callable[..., bytes]
) -> None:
    parts = {
        f"model-0000{i}-of-00002.safetensors": weights({f"w{i}": ("F16", [4], 8)}) for i in (1, 2)
    }
    make_model(tmp_path / "two", **{"model.safetensors": None}, **parts)
    assert scan(tmp_path)["two"].weight_bytes == 16


def test_scan_follows_links_and_lists_a_real_folder_once(tmp_path: Path, make_model: Make) -> None:
    real = make_model(tmp_path / "elsewhere" / "model")
    roots = tmp_path / "root"
    roots.mkdir()
    (roots / "a").symlink_to(real)
    (roots / "b").symlink_to(real)
    (roots / "loop").symlink_to(roots / "loop")
    (roots / "broken").symlink_to(tmp_path / "nowhere")
    linked = tmp_path / "linked_root"
    linked.symlink_to(roots)
    assert [m.name for m in scan_models([Root(linked, "own")]).models] == ["a"]


def test_scan_calls_a_broken_weight_link_incomplete(tmp_path: Path, make_model: Make) -> None:
    folder = make_model(tmp_path / "m", **{"model.safetensors": None})
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    assert "incomplete" in scan(tmp_path)["m"].why


def test_scan_survives_names_that_are_not_unicode(tmp_path: Path, make_model: Make) -> None:
    make_model(Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad-\xff-name")))
    (model,) = scan_models([Root(tmp_path, "own")]).models
    assert model.runnable
    assert json.dumps(model.name).encode()  # printable everywhere
    assert "�" in model.name


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_scan_warns_about_an_unreadable_folder(tmp_path: Path, make_model: Make) -> None:
    make_model(tmp_path / "good")
    (tmp_path / "locked").mkdir(mode=0)
    found = scan_models([Root(tmp_path, "folder")])
    assert [m.name for m in found.models] == ["good"]
    assert "cannot be read" in found.warnings[0]


def test_scan_takes_a_root_that_is_itself_a_model(tmp_path: Path, make_model: Make) -> None:
    make_model(tmp_path / "model")
    assert list(scan(tmp_path / "model")) == ["model"]


def test_packed_weights_count_as_the_values_they_hold(
    tmp_path: Path, make_model: Make, weights: Callable[..., bytes], llama_config: dict
) -> None:
    packed = weights(
        {
            "l.weight": ("U32", [8, 8], 256),  # 8 x 64 values of 4 bits
            "l.scales": ("F16", [8, 2], 32),
            "l.biases": ("F16", [8, 2], 32),
            "norm.weight": ("F16", [64], 128),
        }
    )
    config = llama_config | {"quantization": {"group_size": 32, "bits": 4}}
    make_model(tmp_path / "q", config, **{"model.safetensors": packed})
    model = scan(tmp_path)["q"]
    assert (model.params, model.quant, model.weight_bytes) == (8 * 64 + 64, "4b", 448)


def test_license_comes_from_the_model_card(tmp_path: Path, make_model: Make) -> None:
    make_model(tmp_path / "m", **{"README.md": b"---\nlicense: apache-2.0\n---\nlicense: other"})
    make_model(tmp_path / "n", **{"README.md": b"no head\nlicense: other"})
    assert [m.license for m in scan(tmp_path).values()] == ["apache-2.0", ""]


def test_find_model_by_full_name_short_name_and_folder(tmp_path: Path, make_model: Make) -> None:
    make_model(tmp_path / "org" / "Model-A")
    models = list(scan(tmp_path).values())
    assert find_model("org/Model-A", models).name == "org/Model-A"
    assert find_model("model-a", models).name == "org/Model-A"
    assert find_model(str(tmp_path / "org" / "Model-A"), []).path == tmp_path / "org" / "Model-A"


def test_find_model_refuses_with_what_is_near(tmp_path: Path, make_model: Make) -> None:
    make_model(tmp_path / "one" / "Qwen3-8B")
    make_model(tmp_path / "two" / "Qwen3-8B")
    models = list(scan(tmp_path).values())
    with pytest.raises(ModelNotFoundError, match="could be one/Qwen3-8B or two/Qwen3-8B"):
        find_model("qwen3-8b", models)
    with pytest.raises(ModelNotFoundError, match="did you mean one/Qwen3-8B"):
        find_model("one/Qwen3-8", models)
    with pytest.raises(ModelNotFoundError, match="no model 'x'"):
        find_model("x", models)


def test_roots_are_own_folder_hub_cache_and_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VELOXQUANT_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/some/cache")
    roots = model_roots(["/added"])
    assert [(str(r.path), r.origin) for r in roots] == [
        (f"{tmp_path}/data/models", "own"),
        ("/some/cache", "hub"),
        ("/added", "folder"),
    ]
