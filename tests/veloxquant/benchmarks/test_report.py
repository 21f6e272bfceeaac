"""Selecting parts, files written, and what the tables say."""

import json
from pathlib import Path
from typing import Any

import pytest

from veloxquant.benchmarks import __main__ as program
from veloxquant.benchmarks import report, speed
from veloxquant.benchmarks.machine import describe

VERDICT = {"name": "kivi 2 bit", "kl": 0.2, "rival_kl": 0.1, "how": "somehow", "holds": False}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Parts that only note that they ran."""
    ran: list[tuple[str, bool]] = []

    def fake(name: str, result: Any) -> Any:
        def run(wanted: program.Wanted) -> Any:
            ran.append((name, wanted.quick))
            return result

        return run

    size = {"prompt": 1, "steps": 1}
    results = {
        "pool": [{"case": "a case", "value": 1234.5, "unit": "ms"}],
        "quality": {"size": size, "outcomes": [], "verdicts": [VERDICT]},
    }
    monkeypatch.setattr(program, "PARTS", {n: fake(n, r) for n, r in results.items()})
    return ran


def test_only_selected_parts_run(parts: list[tuple[str, bool]]) -> None:
    assert program.main(["pool", "--quick"]) == 0
    assert parts == [("pool", True)]


def test_all_parts_run_and_both_files_are_written(
    parts: list[tuple[str, bool]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--out", str(tmp_path / "found.json")]) == 0
    assert parts == [("pool", False), ("quality", False)]
    assert "does not hold: quality: kivi 2 bit" in capsys.readouterr().out
    saved = json.loads((tmp_path / "found.json").read_text())
    assert saved["results"]["quality"]["verdicts"] == [VERDICT]
    text = (tmp_path / "found.md").read_text()
    assert "| a case | 1,234.50 | ms |" in text
    assert "| kivi 2 bit | 0.2000 | 0.1000 | somehow | **no** |" in text


def test_a_missed_target_says_what_was_asked_and_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"name": "kivi 4 bit", "asked": "at most 0.50 of a rival", "limit": 0.5}
    row = {
        "heads": "2/1 heads, D=64", "history": 8, "prompt": 4, "name": "kivi 4 bit",
        "milliseconds": 1.0, "of_dense": 1.0, "of_stock": 0.75,
    }  # fmt: skip
    result = {
        "rows": [row],
        "shape": [1, 1, 64, 64],
        "encoders": [],
        "targets": [
            asked | {"reached": 0.75, "holds": False},
            asked | {"name": "kivi 2 bit", "reached": 0.25, "holds": True},
        ],
    }
    monkeypatch.setattr(program, "PARTS", {"prefill": lambda wanted: result})
    assert program.main(["prefill", "--out", str(tmp_path / "found")]) == 0
    said = capsys.readouterr().out
    assert "does not hold: prefill: kivi 4 bit: at most 0.50 of a rival; reached 0.75" in said
    assert "kivi 2 bit" not in said
    text = (tmp_path / "found.md").read_text()
    assert "| kivi 4 bit | at most 0.50 of a rival | 0.75 | **no** |" in text


def test_verdicts_that_are_no_targets_or_are_excused_are_not_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ladder = {"name": "kivi", "asked": "KL falls", "limit": 1.0, "reached": 1.5, "holds": False}
    result = {
        "size": {"prompt": 1, "steps": 1},
        "outcomes": [],
        "verdicts": [
            VERDICT | {"name": "kivi 3 bit", "judged": False},
            VERDICT | {"name": "qjl 2 bit", "judged": False, "excused": "too noisy"},
            VERDICT | {"judged": True, "excused": ""},
        ],
        "targets": [ladder],
    }
    monkeypatch.setattr(program, "PARTS", {"quality": lambda wanted: result})
    assert program.main(["quality", "--out", str(tmp_path / "found")]) == 0
    said = capsys.readouterr().out
    assert "does not hold: quality: kivi 2 bit" in said
    assert "does not hold: quality: kivi: KL falls; reached 1.50" in said
    assert "kivi 3 bit" not in said
    assert "qjl" not in said
    text = (tmp_path / "found.md").read_text()
    assert "| qjl 2 bit | 0.2000 | 0.1000 | somehow | no, as expected: too noisy |" in text
    assert "| kivi 3 bit | 0.2000 | 0.1000 | somehow | no |" in text
    assert "| kivi | KL falls | 1.50 | **no** |" in text


def test_a_selection_of_methods_reaches_the_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[program.Wanted] = []

    def part(wanted: program.Wanted) -> Any:
        seen.append(wanted)
        return {}

    monkeypatch.setattr(program, "PARTS", {"methods": part})
    assert program.main(["methods", "--methods", "kivi, polar"]) == 0
    assert seen == [program.Wanted(quick=False, methods=("kivi", "polar"))]
    with pytest.raises(SystemExit) as left:
        program.main(["methods", "--methods", "kivy"])
    assert left.value.code == 2
    assert "kivy" in capsys.readouterr().err


def test_every_part_has_a_title() -> None:
    assert set(program.PARTS) == set(report.TITLES)


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        program.main(["qualty"])
    assert left.value.code == 2
    assert "quality" in capsys.readouterr().err


def test_without_a_model_one_line_says_what_to_do(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["quality"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "vq models demo" in error


def test_the_machine_is_described_without_names_or_paths() -> None:
    facts = describe(None)
    assert set(facts) >= {"date", "processor", "cores", "versions"}
    assert "mlx " in facts["versions"]
    assert "/" not in facts["processor"]


def test_a_race_makes_a_table() -> None:
    heads = speed.Heads(2, 1, 64)
    lanes = speed.race(heads, 256, (speed.DENSE, speed.STOCK, "kivi 4 bit"), steps=3)
    rows = speed.rows_of(heads, 256, lanes)
    assert [len(lane.seconds) for lane in lanes] == [3, 3, 3]
    assert (rows[0].wall, rows[0].processor) == (1.0, 1.0)
    result = {"rows": [vars(row) for row in rows], "targets": [], "growth": []}
    text = report.speed(result)
    assert "| 2/1 heads, D=64 | 256 | kivi 4 bit |" in text
    assert all(lane.cache.offset == 256 + 3 + speed.WARM_UP for lane in lanes)


def test_targets_name_their_shape_and_length() -> None:
    lanes = [speed.Lane(name, speed.SMALL) for name in (speed.DENSE, speed.STOCK, "kivi 4 bit")]
    for lane, seconds in zip(lanes, (1.0, 3.0, 0.95), strict=True):
        lane.seconds = lane.processor = [seconds]
    dense, stock = speed.targets_of(speed.SMALL, 8192, lanes)
    assert (dense["against"], dense["holds"]) == (speed.DENSE, False)
    assert (stock["against"], stock["holds"]) == (speed.STOCK, True)
    assert dense["asked"] == "at most 0.90 of dense, 9/3 heads, D=64, T=8192"
    text = report.speed({"rows": [], "targets": [dense, stock], "growth": []})
    assert "| 9/3 heads, D=64 | 8192 | kivi 4 bit | dense | 0.90 | 0.95 | **no** |" in text


def test_the_targets_are_those_of_the_packed_kernel() -> None:
    asked = {(t.heads, t.against): t.ratio for t in speed.TARGETS}
    assert asked == {
        (speed.LARGE, speed.DENSE): 0.7,
        (speed.LARGE, speed.STOCK): pytest.approx(1 / 3),
        (speed.SMALL, speed.DENSE): 0.9,
        (speed.SMALL, speed.STOCK): pytest.approx(1 / 3),
    }
    assert len(speed.TARGETS) == 4 * len(speed.PACKED) == 20
