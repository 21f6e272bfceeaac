import pytest

from veloxquant.worker import telemetry
from veloxquant.worker.telemetry import Rate


class Clock:
    """Time that the test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(telemetry, "time", found)
    return found


def test_a_slow_piece_of_a_prompt_counts_until_the_next_is_due(clock: Clock) -> None:
    rate = Rate(window=3.0)
    rate.add(256, 8.0)
    clock.now += 8.0
    assert rate.value() == 32.0
    rate.add(256, 8.0)
    clock.now += 8.0
    assert rate.value() == 32.0
    clock.now += 3.1
    assert rate.value() == 0.0


def test_quick_work_is_forgotten_after_the_window(clock: Clock) -> None:
    rate = Rate(window=3.0)
    rate.add(10, 0.1)
    clock.now += 2.0
    rate.add(40, 0.1)
    assert rate.value() == 250.0
    clock.now += 1.5
    assert rate.value() == 400.0
