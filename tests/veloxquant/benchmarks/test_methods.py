"""Bytes, decode and prompts of every method: what is counted, and when a target is missed."""

from typing import Any

import mlx.core as mx
import pytest

from veloxquant.benchmarks import methods, report
from veloxquant.benchmarks.planned import PLAIN, PUBLISHED, quantising
from veloxquant.benchmarks.speed import DENSE, Heads
from veloxquant.memory.walker import arrays_in

TINY = methods.Size(Heads(2, 1, 64), held=64, contexts=(64, 128), steps=1, prompt=64, turns=1)
ALONE = [row.name for row in quantising() if row.couples == 1]


@pytest.mark.parametrize("name", ["kivi", "turboquant_mse"])
def test_ratios_of_the_plain_methods_are_as_planned(name: str) -> None:
    row = methods.size_of(
        name, methods.Size(Heads(1, 1, 128), 4096, (), steps=1, prompt=1, turns=1)
    )
    assert row["full"] == 2 * 4096 * 128 * 2
    assert row["ratio"] == pytest.approx(PUBLISHED[name], rel=0.01)
    (target,) = methods.size_targets([row])
    assert target["holds"]


def test_bytes_are_those_of_every_array_of_its_own() -> None:
    row = methods.size_of("turboquant_mse", TINY)
    cache = methods.new_layer("turboquant_mse", TINY.heads, 2)
    _, k, v = methods.random_tokens(TINY.heads, TINY.held)
    cache.update_and_fetch(k.astype(mx.float16), v.astype(mx.float16))
    mx.eval(cache.state)
    cache.commit()
    assert row["nbytes"] == cache.nbytes
    assert row["shared"] > 0
    everything = sum(a.nbytes for a in arrays_in([cache]))
    assert everything == row["nbytes"] + row["shared"]


def test_groups_all_begin_with_the_dense_cache() -> None:
    found = list(methods.groups(["a", "b", "c", "d"]))
    assert found == [[DENSE, "a", "b", "c"], [DENSE, "d"]]


def test_both_lengths_take_the_same_turns() -> None:
    lanes = methods.race(TINY, [DENSE, "kivi"])
    assert list(lanes) == [64, 128]
    for tokens, some in lanes.items():
        assert [lane.name for lane in some] == [DENSE, "kivi"]
        assert all(len(lane.seconds) == TINY.steps for lane in some)
        assert all(lane.cache.offset > tokens for lane in some)
    rows = methods.decode_rows(lanes)
    assert [(row["name"], row["tokens"]) for row in rows] == [("kivi", 64), ("kivi", 128)]


def test_a_prompt_goes_into_an_empty_cache_every_time() -> None:
    (row,) = methods.prompts(TINY, ["kivi"])
    assert row["tokens"] == 64
    assert min(row["append_ms"], row["attend_ms"], row["judged"], row["attend_judged"]) >= 0


def _size(ratio: float, planned: float | None) -> dict[str, Any]:
    return {"name": "kivi", "tokens": 64, "ratio": ratio, "planned": planned}


@pytest.mark.parametrize(("ratio", "holds"), [(4.86, True), (4.84, False), (9.0, True)])
def test_a_cache_may_be_three_percent_larger_than_planned(ratio: float, holds: bool) -> None:
    (target,) = methods.size_targets([_size(ratio, 5.0), _size(1.0, None)])
    assert target["holds"] is holds


@pytest.mark.parametrize(
    ("name", "reached", "holds"),
    [("kivi", 1.0, True), ("kivi", 1.01, False), ("gear", 3.0, True), ("gear", 3.01, False)],
)
def test_plain_methods_must_not_be_slower_than_dense(
    name: str, reached: float, holds: bool
) -> None:
    assert ("kivi" in PLAIN, "gear" in PLAIN) == (True, False)
    (target,) = methods.decode_targets([{"name": name, "tokens": 64, "of_dense": reached}])
    assert target["holds"] is holds


@pytest.mark.parametrize(("last", "holds"), [(2.59, True), (2.61, False)])
def test_a_step_may_not_outgrow_the_length(last: float, holds: bool) -> None:
    rows = [
        {"name": "kivi", "tokens": 128, "judged": last},
        {"name": "kivi", "tokens": 64, "judged": 1.0},
    ]
    (target,) = methods.growth_targets(rows)
    assert target["holds"] is holds
    assert target["reached"] == last


@pytest.mark.parametrize(
    ("name", "judged", "holds"),
    [("kivi", 1000, True), ("kivi", 1001, False), ("vecinfer", 3000, True),
     ("vecinfer", 3001, False)],
)  # fmt: skip
def test_a_prompt_takes_a_second_a_layer_at_most(name: str, judged: float, holds: bool) -> None:
    (target,) = methods.prompt_targets([{"name": name, "tokens": 64, "judged": judged}])
    assert target["holds"] is holds


def test_a_run_makes_a_table() -> None:
    lines: list[str] = []
    chosen = ("kivi", "polar")
    result = methods.run(size=TINY, methods=chosen, report=lines.append)
    assert len(lines) == 2 + 2 * 2 + 2
    assert len(result["targets"]) == 2 + 2 * 2 + 2 + 2
    text = report.methods(result)
    head = next(line for line in text.splitlines() if line.startswith("| method"))
    assert "step, T=64, ms | of dense | step, T=128, ms | of dense" in head
    for name in chosen:
        row = next(line for line in text.splitlines() if line.startswith(f"| {name} "))
        assert row.count("|") == head.count("|")
    assert "Left out" not in text


@pytest.mark.parametrize("name", ALONE)
def test_every_method_can_be_built_for_a_measurement(name: str) -> None:
    assert methods.new_lane(name, TINY.heads).cache.offset == 0
