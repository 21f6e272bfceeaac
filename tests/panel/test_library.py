"""Planning behind the panel's port: a made-up model folder, its bytes, its refusals."""

import dataclasses
import json
import struct

import msgspec
import pytest

from veloxquant.panel.library import PlanningLibrary, _demo_answer
from veloxquant.panel.ports import CommandFailed
from veloxquant.panel.proposal import propose, spec_for

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def models(home, monkeypatch):
    """A folder with one good model and one whose weights are cut short."""
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    root = home / "data" / "models"
    header = {"w": {"dtype": "BF16", "shape": [1000, 256], "data_offsets": [0, 512_000]}}
    raw = json.dumps(header).encode()
    for name, body in (("good", 512_000), ("short", 10)):
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0" * body)
    return root


def test_models_are_listed_with_what_fits(models):
    found = {item.name: item for item in PlanningLibrary().models()}
    good, short = found["good"], found["short"]
    assert good.runnable
    assert good.fits_tokens == 4096
    assert good.native_context == 4096
    assert any("4 layers" in value for _, value in good.facts)
    assert not short.runnable
    assert "model.safetensors" in short.why_not


def test_a_table_has_real_methods_and_planned_ones(models):
    library = PlanningLibrary()
    good = next(item for item in library.models() if item.name == "good")
    report = library.fit(good, 2048, 1)
    rows = {row.method: row for row in report.rows}
    assert len(rows) == 44
    assert rows["kivi"].kv < rows["fp16"].kv / 3
    assert rows["fp16"].peak >= report.weights + rows["fp16"].kv
    assert all(row.blurb for row in report.rows)
    twice = library.fit(good, 2048, 2)
    assert next(row.kv for row in twice.rows if row.method == "fp16") == 2 * rows["fp16"].kv


@pytest.mark.parametrize(("backend", "says"), [("cpu", True), ("metal", False)])
def test_where_uncompressed_rows_have_32_bits_that_is_said(models, monkeypatch, backend, says):
    monkeypatch.setattr("veloxquant.planning.room.this_backend", lambda: backend)
    monkeypatch.setattr("veloxquant.panel.library.this_backend", lambda: backend)
    library = PlanningLibrary()
    good = next(item for item in library.models() if item.name == "good")
    told = [row.method for row in library.fit(good, 2048, 1).rows if "32 bits" in row.note]
    assert told == (["fp16"] if says else [])
    assert ("in 32 bits" in dict(good.facts)["weights"]) == says


def test_a_broken_model_is_refused_in_words(models):
    library = PlanningLibrary()
    short = next(item for item in library.models() if item.name == "short")
    with pytest.raises(CommandFailed) as raised:
        library.fit(short, 2048, 1)
    assert "short" in raised.value.message
    assert raised.value.hint


def test_checks_settings_memory_and_last_start(models):
    library = PlanningLibrary()
    items = library.models()
    assert any("model" in check.text for check in library.checks(items))
    assert library.memory().total > library.memory().room > 0
    keys = {item.key: item for item in library.settings()}
    assert keys["server.port"].value == "8000"
    assert keys["server.port"].origin == "default"
    good = next(item for item in items if item.name == "good")
    library.keep_start(spec_for(good, "kivi", 1024, library.template()))
    again = propose(tuple(items), library.last_start(), library.template())
    assert (again.model.name, again.spec.method, again.spec.context) == ("good", "kivi", 1024)
    assert again.why == "what ran here last"
    spec = spec_for(good, "kivi", 1024, library.template())
    library.keep_start(msgspec.structs.replace(spec, options={"bit_width_inlier": 4}))
    again = propose(tuple(items), library.last_start(), library.template())
    assert again.spec.options == {"bit_width_inlier": 4}


def test_settings_of_a_method_are_read_and_refused_in_words(models):
    library = PlanningLibrary()
    assert "bit_width_inlier=2" in library.method_settings("kivi")
    assert library.method_settings("fp16") == ""
    options = library.parse_settings("kivi", "4 residual_length=64")
    assert options == {"bit_width_inlier": 4, "residual_length": 64}
    for text in ("7", "x", "n_heads=3", "residual_length=", "=4"):
        with pytest.raises(CommandFailed) as raised:
            library.parse_settings("kivi", text)
        assert raised.value.message
    good = next(item for item in library.models() if item.name == "good")
    sizes = [
        next(row.kv for row in library.fit(good, 8192, 1, 0, given).rows if row.method == "kivi")
        for given in ({}, {"kivi": options})
    ]
    assert sizes[1] > 1.3 * sizes[0]


def test_a_proposal_is_cut_to_what_fits(models):
    library = PlanningLibrary()
    proposal = propose(tuple(library.models()), {}, library.template())
    assert proposal.spec.context == 4096, "the model was made for no more"
    assert proposal.spec.method == "turboquant_rvq"
    assert proposal.spec.options == {"bit_width_inlier": 4}, "a small model feels fewer bits"
    large = dataclasses.replace(proposal.model, params=8_000_000_000)
    assert propose((large,), {}, library.template()).spec.options == {}
    own_widths = msgspec.structs.replace(library.template(), method="kitty")
    proposal = propose(tuple(library.models()), {}, own_widths)
    assert proposal.spec.options == {}, "kitty has no common bit width"
    assert propose((), {}) is None


@pytest.mark.parametrize(
    ("code", "answer", "words"),
    [
        (6, '{"error": {"message": "no route", "hint": "check it"}}', "no route"),
        (1, "not json", "downloading"),
        (1, "[]", "downloading"),
    ],
)
def test_a_demo_model_that_cannot_be_fetched(code, answer, words):
    with pytest.raises(CommandFailed, match=words):
        _demo_answer(code, answer, ["starting", "downloading"])


def test_the_demo_models_folder_is_returned():
    assert _demo_answer(0, '{"data": {"path": "/m/demo"}}', [""]) == "/m/demo"
