"""Whole-model decode on a tiny random model: that every lane runs, and when a target is missed."""

from typing import Any

import pytest
from tiny_model import make_tiny_model

from veloxquant.benchmarks import report, serving
from veloxquant.cache.builder import plan_model
from veloxquant.config.kv_cache import BASELINE, KVCacheConfig


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A loaded model of two layers."""
    from mlx_lm.utils import load_model

    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny")))[0]


def test_all_lanes_decode_a_token_a_turn(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "load", lambda: (tiny, None))
    lines: list[str] = []
    result = serving.run(contexts=(160,), steps=2, report=lines.append)
    rows = {row["name"]: row for row in result["rows"]}
    rivals = [serving.FLOOR, serving.NATIVE, serving.STOCK]
    assert list(rows) == [BASELINE, *rivals, *list(serving.METHODS)[1:]]
    assert len(lines) == len(rows)
    assert rows[BASELINE]["wall"] == rows[BASELINE]["total"] == 1.0
    assert rows[serving.STOCK]["nbytes"] < rows[BASELINE]["nbytes"]
    assert rows[serving.FLOOR]["nbytes"] <= rows[serving.NATIVE]["nbytes"]
    assert result["targets"] == []  # none is set for so short a context
    assert "| 160 | kivi 4 bit |" in report.serving(result)


def test_a_step_is_one_token_in_the_batch_and_alone(tiny: Any) -> None:
    plan = plan_model(tiny, KVCacheConfig(method="kivi"))
    names = (BASELINE, serving.STOCK)
    batched, single = serving.decode(plan, 160, names, steps=2)
    assert isinstance(batched, serving.Batched)
    assert isinstance(single, serving.Single)
    assert len(batched.seconds) == len(single.seconds) == 2
    row, alone = batched._generator._generation_batch.prompt_cache[0].rows[0], single._caches[0]
    before = row.offset, alone.offset
    assert min(before) >= 160 + serving.WARM_UP + 2
    for runner in (batched, single):
        runner.step()
    assert (row.offset, alone.offset) == (before[0] + 1, before[1] + 1)
    for runner in (batched, single):
        runner.close()


class _Timed(serving.Single):
    """A contender whose steps took what we say."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.seconds = self.processor = [seconds]


def test_packed_methods_are_held_against_fp16_and_the_stock_cache() -> None:
    runners = [
        _Timed(BASELINE, 1.0),
        _Timed(serving.STOCK, 1.5),
        _Timed("kivi 4 bit", 1.0),
        _Timed("kivi 2 bit", 1.1),
        _Timed("snapkv 512", 9.0),
    ]
    at_4k = {
        (t["name"], t["against"]): (round(t["reached"], 2), t["holds"])
        for t in serving.targets_of(4096, runners)
    }
    assert at_4k == {
        ("kivi 4 bit", BASELINE): (1.0, True),
        ("kivi 4 bit", serving.STOCK): (1.5, True),
        ("kivi 2 bit", BASELINE): (0.91, False),
        ("kivi 2 bit", serving.STOCK): (1.36, False),
    }
    assert all(t["holds"] for t in serving.targets_of(1024, runners))
    assert {t["against"] for t in serving.targets_of(1024, runners)} == {serving.STOCK}
