"""Whether and when a crashed worker is started again: a pure function of its crash times.

A crash waits `base * 2**n` seconds, at most `cap`, times a random factor of 0.5 to 1, where `n`
counts the earlier crashes within `window`. After `tries` restarts within the window it is given
up. The count is forgotten after `steady` seconds of being *ready*, not of being alive.
"""

from typing import NamedTuple


class Policy(NamedTuple):
    """Parameters of the restart policy, seconds and counts."""

    base: float = 0.5
    cap: float = 30.0
    tries: int = 5
    window: float = 120.0
    steady: float = 60.0


class Retry(NamedTuple):
    """Start again after `delay` seconds."""

    delay: float
    attempt: int


class GiveUp(NamedTuple):
    """Do not start again by itself; `looped` when the tries are used up."""

    looped: bool


def recent(crashes: tuple[float, ...], now: float, policy: Policy) -> tuple[float, ...]:
    """The crashes that still count at `now`."""
    return tuple(t for t in crashes if now - t < policy.window)


def decide(
    earlier: tuple[float, ...], now: float, *, heals: bool, jitter: float, policy: Policy
) -> Retry | GiveUp:
    """What follows a crash at `now`.

    Args:
        earlier: times of earlier crashes of the same launch, this one not included.
        now: monotonic time of the crash, seconds.
        heals: whether this kind of failure can go away by itself.
        jitter: random number in [0, 1].
        policy: the parameters.
    """
    if not heals:
        return GiveUp(looped=False)
    attempt = len(recent(earlier, now, policy))
    if attempt >= policy.tries:
        return GiveUp(looped=True)
    delay = min(policy.cap, policy.base * 2.0**attempt) * (0.5 + 0.5 * jitter)
    return Retry(delay, attempt + 1)
