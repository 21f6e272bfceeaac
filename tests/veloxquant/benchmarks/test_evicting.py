"""Decode and prompts of methods that give up tokens: who is raced, and when a target is missed."""

from typing import Any

import pytest

from veloxquant.benchmarks import evicting, report
from veloxquant.benchmarks.keepers import BUDGETS
from veloxquant.benchmarks.speed import DENSE, Heads
from veloxquant.cache.table import TABLE

TINY = evicting.Size(Heads(2, 1, 64), budget=64, short=96, long=160, steps=1, prompt=64, turns=1)


def test_every_method_that_gives_up_tokens_is_measured() -> None:
    assert set(BUDGETS) == {row.name for row in TABLE.values() if row.trim == "until_evicted"}


@pytest.mark.parametrize("name", list(BUDGETS))
def test_rows_held_are_those_of_the_budget(name: str) -> None:
    whole, _, last = evicting.race(TINY, [name])
    assert whole["rows"] > TINY.long - 10
    if name not in ("squeeze", "rocketkv"):  # the mean over layers; pages of a whole prompt
        assert last["rows"] <= TINY.budget + 8
    assert last["rows"] < TINY.long


def test_a_table_and_its_targets() -> None:
    found = evicting.run(size=TINY, names=["tova"])
    assert [t["name"] for t in found["targets"]] == ["tova"] * 3
    text = report.evicting(found)
    assert "| tova |" in text
    assert DENSE in text


def _row(tokens: int, budget: int, judged: float, of_dense: float) -> dict[str, Any]:
    return {"name": "a", "tokens": tokens, "budget": budget, "judged": judged,
            "of_dense": of_dense}  # fmt: skip


@pytest.mark.parametrize(
    ("of_dense", "last", "holds"),
    [(3.0, 1.3, [True, True]), (3.1, 1.3, [False, True]), (1.0, 1.4, [True, False])],
)
def test_limits_of_a_step(of_dense: float, last: float, holds: list[bool]) -> None:
    rows = [_row(160, 160, 9, of_dense), _row(96, 64, 1.0, 1), _row(160, 64, last, 1)]
    assert [t["holds"] for t in evicting.decode_targets(TINY, rows)] == holds


@pytest.mark.parametrize(("judged", "holds"), [(1999.0, True), (2001.0, False)])
def test_a_prompt_may_cost_a_second_beyond_its_attention(judged: float, holds: bool) -> None:
    row = {"name": "a", "tokens": 64, "judged": judged, "dense": 1000.0}
    assert evicting.prompt_targets([row])[0]["holds"] is holds
