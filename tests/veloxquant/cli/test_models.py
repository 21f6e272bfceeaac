import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veloxquant.cli import exit_codes, models
from veloxquant.cli.output import count
from veloxquant.integration import demo_model
from veloxquant.planning.room import assumed_room

Run = Callable[..., tuple[int, str, str]]


def test_empty_list_says_where_it_looked_and_what_to_do(run: Run) -> None:
    code, out, err = run("models", "ls")
    assert (code, out) == (0, "")
    assert "Hugging Face cache" in err
    assert "vq models demo" in err


def test_list(run: Run, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "room_now", lambda: assumed_room(64 << 30))
    code, out, _ = run("models")
    assert code == 0
    assert "Tiny-1B" in out
    assert str(demo) not in out
    assert run("models", "ls", "-q")[1] == "Tiny-1B\n"
    assert str(demo) in run("models", "ls", "--paths")[1]
    data = json.loads(run("models", "ls", "--json")[1])["data"]
    assert data["models"][0]["runnable"] is True
    assert data["models"][0]["fits_method"] == "turboquant_rvq"
    assert "path" not in data["models"][0]


def test_a_bad_model_says_why(run: Run, demo: Path) -> None:
    (demo / "config.json").write_text("{")
    assert "no: config.json is not valid JSON" in run("models", "ls")[1]
    assert run("models", "show", "tiny-1b")[0] == 0
    code, _, err = run("fit", "Tiny-1B")
    assert (code, "not valid JSON" in err) == (exit_codes.UNSUPPORTED, True)


def test_show(run: Run, demo: Path) -> None:
    data = json.loads(run("models", "show", "tiny-1b", "--json")[1])["data"]
    assert (data["layers"], data["layers_compressed"]) == (16, 16)
    assert data["native_context"] == 131072
    assert data["path"] == str(demo)


def test_an_added_folder_is_searched(run: Run, demo: Path, tmp_path: Path) -> None:
    demo.rename(tmp_path / "moved")
    assert run("config", "set", "models.folders", str(tmp_path))[0] == 0
    assert run("models", "ls", "-q")[1] == "moved\n"
    assert run("config", "set", "models.folders", f"{tmp_path},/not/here")[0] == 0
    assert "/not/here is not there" in run("models", "ls")[2]


def test_unknown_model_is_code_3(run: Run, demo: Path) -> None:
    code, out, err = run("models", "show", "Tiny-2B")
    assert (code, out) == (exit_codes.NOT_FOUND, "")
    assert "did you mean Tiny-1B" in err


def test_demo_reports_a_failed_download(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise demo_model.DemoModelError("no route", "check it", "network")

    monkeypatch.setattr(demo_model, "install", fail)
    assert run("models", "demo") == (exit_codes.NETWORK, "", "error: no route\n  check it\n")
    body = json.loads(run("models", "demo", "--json")[1])
    assert body["error"]["code"] == "network"


def test_fit(run: Run, demo: Path) -> None:
    code, out, _ = run("fit", "Tiny-1B", "--context", "32k", "--ram", "2G")
    assert code == 0
    assert "turboquant_rvq" in out
    data = json.loads(run("fit", "Tiny-1B", "--ram", "2G", "--json")[1])["data"]
    assert data["room"]["nbytes"] == 2 << 30
    rows = {row["method"]: row for row in data["methods"]}
    assert rows["kivi"]["max_context"] > rows["fp16"]["max_context"]
    assert data["context"] == 8192


def test_list_by_fit_puts_what_fits_longest_first(
    run: Run, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "room_now", lambda: assumed_room(2 << 30))
    short = demo.with_name("A-short")
    shutil.copytree(demo, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    shutil.copytree(demo, demo.with_name("A-bad"))
    (demo.with_name("A-bad") / "model.safetensors").unlink()
    assert run("models", "ls", "-q")[1].split() == ["A-bad", "A-short", "Tiny-1B"]
    lines = run("models", "ls", "--sort", "fit")[1].splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["Tiny-1B", "A-short", "A-bad"]
    assert "512 turboquant_rvq" in lines[1]
    assert run("models", "ls", "--sort", "fit", "-q")[1].split()[0] == "Tiny-1B"
    assert json.loads(run("models", "ls", "-q", "--json")[1])["data"]["models"]
    monkeypatch.setattr(models, "room_now", lambda: assumed_room(1 << 20))
    assert "too big here" in run("models", "ls")[1]


@pytest.mark.parametrize(("backend", "says"), [("cpu", True), ("metal", False)])
def test_fit_and_methods_say_that_uncompressed_rows_have_32_bits_here(
    run: Run, demo: Path, monkeypatch: pytest.MonkeyPatch, backend: str, says: bool
) -> None:
    monkeypatch.setattr("veloxquant.planning.room.this_backend", lambda: backend)
    monkeypatch.setattr("veloxquant.cli.methods.this_backend", lambda: backend)
    for words in (("fit", "Tiny-1B", "--ram", "8G"), ("methods",)):
        lines = run(*words)[1].splitlines()
        told = [line.split()[0] for line in lines if "held in 32 bits on this machine" in line]
        assert told == (["fp16"] if says else [])


def test_fit_that_cannot_is_code_4(run: Run, demo: Path) -> None:
    code, _, err = run("fit", "Tiny-1B", "--ram", "100M")
    assert (code, "too large" in err) == (exit_codes.DOES_NOT_FIT, True)


def test_config_round_trip(run: Run, home: Path) -> None:
    assert run("config", "get", "server.port")[1] == "8000\n"
    assert run("config", "set", "server.port", "8111")[0] == 0
    assert run("config", "get", "server.port")[1] == "8111\n"
    assert run("config", "set", "server.port", "")[0] == 0
    assert run("config", "get", "server.port")[1] == "8000\n"
    assert run("config", "set", "server.port", "x")[0] == exit_codes.USAGE
    assert run("config", "get", "server.prot")[0] == exit_codes.NOT_FOUND
    assert run("config", "path")[1].strip() == str(home / "config" / "config.toml")
    assert "server.port" in json.loads(run("config", "ls", "--json")[1])["data"]


def test_doctor(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    data = json.loads(out)["data"]
    assert data["ok"] == (code == 0)
    names = {check["name"] for check in data["checks"]}
    assert names >= {"machine", "python", "mlx", "memory", "models", "port", "supervisor"}
    assert "vq models demo" in run("doctor")[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(run: Run, shell: str) -> None:
    code, out, _ = run("completion", shell)
    assert code == 0
    assert "vq" in out


def test_fit_of_one_method_takes_its_settings(run: Run, demo: Path) -> None:
    def kivi(*words: str) -> dict:
        out = run("fit", "Tiny-1B", "--ram", "3G", "--method", "kivi", *words, "--json")[1]
        [row] = json.loads(out)["data"]["methods"]
        return row

    assert kivi("--set", "bit_width_inlier=8")["kv_bytes"] > kivi("--bits", "2")["kv_bytes"]
    out = run("fit", "Tiny-1B", "--ram", "3G", "--method", "kivi", "--bits", "2")[1]
    assert "2 bit" in out
    assert "bit_width_inlier=2" in out
    assert "turboquant_rvq" not in out
    assert "* proposed" not in out


def test_fit_plans_an_answer_and_the_most_on_the_way(run: Run, demo: Path) -> None:
    def row(*words: str) -> tuple[int, dict[str, Any]]:
        out = run("fit", "Tiny-1B", "--ram", "8G", "--context", "4096", *words, "--json")[1]
        data = json.loads(out)["data"]
        return data["answer"], data["methods"][0]

    answer, usual = row("--method", "snapkv")
    assert (answer, usual["rows"]) == (512, 1024), "server.max_tokens"
    answer, long = row("--method", "snapkv", "--answer", "2000")
    assert (answer, long["rows"]) == (2000, 2512)
    assert long["kv_bytes"] > usual["kv_bytes"]
    kvquant = row("--method", "kvquant")[1]
    assert kvquant["kv_end_bytes"] < kvquant["kv_bytes"]
    words = ("fit", "Tiny-1B", "--ram", "8G", "--context", "4096", "--method")
    assert "at exactly 4,096 tokens" in run(*words, "kvquant")[1]
    assert "at exactly" not in run(*words, "vecinfer")[1]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--set", "kivi_group_size=64"), exit_codes.USAGE, "--method"),
        (("--method", "kivi", "--set", "snap_budget=1"), exit_codes.USAGE, "snap_budget"),
        (("--method", "nope"), exit_codes.NOT_FOUND, "Ready: fp16"),
    ],
)
def test_fit_refuses_settings_as_up_does(
    run: Run, demo: Path, words: tuple, code: int, says: str
) -> None:
    status, out, err = run("fit", "Tiny-1B", *words)
    assert (status, out) == (code, "")
    assert says in err


def test_fit_beyond_the_native_context_says_so(run: Run, demo: Path) -> None:
    code, out, err = run("fit", "Tiny-1B", "--context", "256k", "--ram", "900G")
    assert code == exit_codes.DOES_NOT_FIT
    assert "Tiny-1B was made for 131,072 tokens; asked 262,144." in err
    assert "beyond native" in out
    assert "* proposed" not in out
    out = run("fit", "Tiny-1B", "--ram", "3G")[1]
    assert sum(line.split()[1:2] == ["*"] for line in out.splitlines()) == 1
    assert "\n* proposed for this length" in out


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "-"), (999, "999"), (134_515_008, "135M"), (8_190_000_000, "8.2B")],
)
def test_counts_are_rounded_as_the_panel_rounds_them(number: int | None, text: str) -> None:
    assert count(number) == text
