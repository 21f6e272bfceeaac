"""Who is better at equal bytes."""

import math

import pytest

from veloxquant.benchmarks.compare import Outcome, judge, rival_at


def outcome(name: str, kind: str, nbytes: int, kl: float) -> Outcome:
    return Outcome(name, kind, kl, 0.0, 1.0, 1.0, nbytes, 0.0)


TWO = outcome("2 bit", "stock", 200, 1.0)
FOUR = outcome("4 bit", "stock", 400, 1.0 / 16)
WORSE = outcome("4 bit, wide", "stock", 450, 0.5)
RIVALS = [FOUR, WORSE, TWO]


@pytest.mark.parametrize(
    ("nbytes", "kl", "source"),
    [
        (100, 1.0, "more bytes"),
        (200, 1.0, "more bytes"),
        (300, 1.0 / 4, "between 2 bit and 4 bit"),
        (350, 1.0 / 8, "between"),
        (400, 1.0 / 16, "between"),
        (450, 1.0 / 16, "fewer bytes"),
        (900, 1.0 / 16, "fewer bytes"),
    ],
)
def test_the_rival_gets_a_quarter_of_the_kl_for_a_bit_more(
    nbytes: int, kl: float, source: str
) -> None:
    found = rival_at(RIVALS, nbytes)
    assert found is not None
    assert math.isclose(found[0], kl, rel_tol=1e-9)
    assert source in found[1]


def test_without_rivals_there_is_nothing_to_compare() -> None:
    assert rival_at([], 100) is None
    assert judge([outcome("kivi 2 bit", "ours", 1, 1.0)]) == []


@pytest.mark.parametrize(("kl", "holds"), [(0.2499, True), (0.2501, False)])
def test_packed_methods_meet_the_stock_cache_at_their_bytes(kl: float, holds: bool) -> None:
    [verdict] = judge([*RIVALS, outcome("kivi 3 bit", "ours", 300, kl)])
    assert (verdict.name, verdict.holds) == ("kivi 3 bit", holds)
    assert math.isclose(verdict.rival_kl, 0.25)


def test_evicting_methods_meet_their_own_lot() -> None:
    field = [
        outcome("snapkv 512", "evicting", 100, 0.2),
        outcome("streaming_llm 512", "evicting", 100, 0.3),
        outcome("random for streaming_llm", "random", 100, 0.1),
        outcome("random for snapkv", "random", 100, 0.4),
        TWO,
    ]
    assert [(v.rival_kl, v.holds) for v in judge(field)] == [(0.4, True), (0.1, False)]
