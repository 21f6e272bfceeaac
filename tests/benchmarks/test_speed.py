"""Decode attention against the dense cache, in the same run.

The quick test allows three times the ratio to dense that a quiet machine must hold; `make bench`
and the `bench` tests measure the ratios themselves.
"""

import pytest

from veloxquant.benchmarks.speed import (
    DENSE,
    LARGE,
    LENGTHS,
    PACKED,
    SMALL,
    STOCK,
    TARGETS,
    Heads,
    growth,
    race,
    ratio,
    targets_of,
)

SLACK = 3.0


@pytest.mark.timeout(120)
def test_no_method_is_much_slower_than_it_should_be() -> None:
    checked = targets_of(SMALL, 4096, race(SMALL, 4096, (DENSE, *PACKED), steps=15))
    assert len(checked) == len(PACKED)
    slow = [t for t in checked if t["reached"] > SLACK * t["ratio"]]
    assert not slow


@pytest.mark.timeout(120)
def test_evicting_methods_are_faster_than_dense_on_a_long_context() -> None:
    dense, *evicting = race(SMALL, 4096, (DENSE, "snapkv 512", "streaming_llm 516"), steps=15)
    for lane in evicting:
        assert lane.cache.rows < 600
        assert ratio(lane, dense) < 1.0, lane.name


@pytest.mark.bench
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("heads", [LARGE, SMALL], ids=str)
def test_ratios(heads: Heads, tokens: int) -> None:
    checked = targets_of(heads, tokens, race(heads, tokens, (DENSE, STOCK, *PACKED), steps=64))
    assert len(checked) == sum(t.heads == heads for t in TARGETS)
    assert not [t for t in checked if not t["holds"]]


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_time_grows_no_faster_than_the_context() -> None:
    grown = growth(SMALL, (DENSE, "kivi 4 bit", "kivi 2 bit", "turboquant_rvq 2 bit"), steps=32)
    assert not [g for g in grown if not g["holds"]]
