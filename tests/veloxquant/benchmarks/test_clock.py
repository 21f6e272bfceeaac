"""Fair turns and what a stopwatch keeps."""

import pytest

from veloxquant.benchmarks.clock import Stopwatch, in_turns, median_ratio


def test_everyone_moves_once_a_turn_and_first_moves_on() -> None:
    assert list(in_turns(["a", "b", "c"], 4)) == [
        ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]
    ]  # fmt: skip


def test_a_stopwatch_notes_both_clocks_and_forgets_the_warm_up() -> None:
    clock = Stopwatch("a name")
    done: list[int] = []
    for i in range(3):
        clock.time(lambda i=i: done.append(i))
    assert done == [0, 1, 2]
    assert len(clock.seconds) == len(clock.processor) == 3
    clock.seconds[:] = [9.0, 1.0, 3.0]
    clock.processor[:] = [9.0, 2.0, 4.0]
    clock.forget(1)
    assert clock.seconds == [1.0, 3.0]
    assert clock.milliseconds == pytest.approx(2000)
    assert clock.judged in (clock.seconds, clock.processor)
    assert clock.judged_milliseconds in (pytest.approx(2000), pytest.approx(3000))


def test_the_ratio_is_taken_turn_by_turn() -> None:
    # A slow second turn hits both and leaves the ratio alone.
    assert median_ratio([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == 0.5
