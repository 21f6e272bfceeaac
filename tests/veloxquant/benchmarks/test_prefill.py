"""Prompts over packed history and encoders: that they run, and when a target is missed."""

from typing import Any

import pytest

from veloxquant.benchmarks import prefill, report
from veloxquant.benchmarks.speed import DENSE, PACKED, STOCK, Heads

TINY = prefill.Size(Heads(2, 1, 64), history=192, prompt=32, turns=2)
SHAPE = (1, 1, 64, 64)


def test_every_turn_starts_from_the_same_history() -> None:
    lanes = prefill.read_prompts(TINY, (DENSE, STOCK, *PACKED))
    assert [lane.name for lane in lanes] == [DENSE, STOCK, *PACKED]
    assert {lane.cache.offset for lane in lanes} == {192}
    assert {len(lane.seconds) for lane in lanes} == {2}
    rows = {row["name"]: row for row in prefill.rows_of(TINY, lanes)}
    assert rows[DENSE]["of_dense"] == rows[STOCK]["of_stock"] == 1.0
    assert all(row["milliseconds"] > 0 for row in rows.values())


def test_every_format_is_encoded() -> None:
    clocks = prefill.encode_all(SHAPE, turns=2)
    assert [clock.name for clock in clocks] == list(prefill.formats())
    assert len(clocks) == 16
    assert {len(clock.seconds) for clock in clocks} == {2}


def _row(name: str, of_stock: float) -> dict[str, Any]:
    return {
        "heads": "2/1 heads, D=64", "history": 192, "prompt": 32, "name": name,
        "milliseconds": 1.0, "of_dense": 1.0, "of_stock": of_stock,
    }  # fmt: skip


@pytest.mark.parametrize(("reached", "holds"), [(0.5, True), (0.51, False)])
def test_half_the_time_of_the_stock_cache_is_asked_of_packed_methods(
    reached: float, holds: bool
) -> None:
    rows = [_row(DENSE, 9.0), _row(STOCK, 1.0), _row("kivi 4 bit", reached)]
    (target,) = prefill.attention_targets(TINY, rows)
    assert (target["name"], target["reached"], target["holds"]) == ("kivi 4 bit", reached, holds)
    assert "32 tokens over 192" in target["asked"]


@pytest.mark.parametrize(("judged", "holds"), [(20.0, True), (20.1, False)])
def test_an_encoder_is_judged_by_the_clock_that_counts(judged: float, holds: bool) -> None:
    rows = [{"name": "codebook 4 bit", "milliseconds": 1.0, "judged": judged}]
    (target,) = prefill.encoder_targets(prefill.ROWS, rows)
    assert target["holds"] is holds
    assert target["name"] == "encoder codebook 4 bit"


def test_a_quick_run_sets_no_target_for_a_short_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "QUICK", TINY)
    monkeypatch.setattr(prefill, "ROWS", SHAPE)
    lines: list[str] = []
    result = prefill.run(quick=True, report=lines.append)
    assert len(lines) == len(result["rows"]) + len(result["encoders"])
    assert [t["name"].split()[0] for t in result["targets"]] == ["encoder"] * 16
    text = report.prefill(result)
    assert "| 32 | 192 | 2/1 heads, D=64 | kivi 4 bit |" in text
    assert "| encoder codebook 4 bit | at most 20 ms for 64 tokens x 1 heads, D=64 |" in text
