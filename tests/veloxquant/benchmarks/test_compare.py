"""Who is better at equal bytes."""

import math
from dataclasses import replace

import pytest

from veloxquant.benchmarks.compare import Outcome, best_of_four, judge, ladders, rival_at


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


@pytest.mark.parametrize(
    ("method", "default", "kl", "judged", "excused"),
    [
        ("kivi", True, 0.9, True, False),
        ("kivi", False, 0.9, False, False),
        ("qjl", True, 0.9, False, True),
        ("qjl", True, 0.1, True, False),
    ],
)
def test_only_defaults_are_targets_and_losers_by_design_are_excused(
    method: str, default: bool, kl: float, judged: bool, excused: bool
) -> None:
    mine = replace(outcome("mine", "ours", 300, kl), method=method, default=default)
    [verdict] = judge([*RIVALS, mine])
    assert (verdict.judged, bool(verdict.excused)) == (judged, excused)
    assert verdict.holds is (kl <= 0.25)


def ladder(method: str, *kls: float) -> list[Outcome]:
    return [
        replace(outcome(f"{method} {b} bit", "ours", 100 * b, kl), method=method, width=b)
        for b, kl in enumerate(kls, 2)
    ]


def test_every_bit_must_make_the_error_smaller() -> None:
    field = [*ladder("kivi", 1.0, 0.2, 0.1), *ladder("gear", 1.0, 0.2, 0.3), *ladder("amc", 1.0)]
    good, bad = ladders([*reversed(field), *RIVALS])[::-1]
    assert (good["name"], good["holds"]) == ("kivi", True)
    assert (bad["name"], bad["holds"]) == ("gear", False)
    assert good["reached"] == pytest.approx(0.5)
    assert bad["reached"] == pytest.approx(1.5)
    assert "2, 3, 4 bits" in good["asked"]


def test_a_method_whose_bits_are_not_those_of_the_keys_is_excused() -> None:
    rising, falling = (ladders(ladder("qjl", *kls))[0] for kls in ((1.0, 1.1), (1.0, 0.9)))
    assert (rising["holds"], rising["judged"], bool(rising["excused"])) == (False, False, True)
    assert (falling["holds"], falling["judged"], falling["excused"]) == (True, True, "")


@pytest.mark.parametrize(("kl", "holds"), [(0.0624, True), (0.0626, False)])
def test_the_best_with_fewer_bytes_must_beat_four_bits(kl: float, holds: bool) -> None:
    rival = outcome("mlx-lm 4 bit g32", "stock", 400, 1.0 / 16)
    field = [
        outcome("mlx-lm 8 bit g32", "stock", 800, 0.001),
        rival,
        outcome("kivi 4 bit", "ours", 399, kl),
        outcome("kivi 2 bit", "ours", 200, 0.5),
        outcome("kivi 8 bit", "ours", 400, 0.001),
    ]
    [target] = best_of_four(field)
    assert target["name"].startswith("kivi 4 bit")
    assert target["holds"] is holds
    assert best_of_four([rival]) == []
