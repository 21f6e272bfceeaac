from hypothesis import given
from hypothesis import strategies as st

from veloxquant.supervisor.policy import GiveUp, Policy, Retry, decide

POLICY = Policy()


def waits(jitter: float) -> list[float]:
    """Waits of a server that crashes the moment it is started, until it is given up."""
    crashes: tuple[float, ...] = ()
    now, out = 0.0, []
    while isinstance(
        choice := decide(crashes, now, heals=True, jitter=jitter, policy=POLICY), Retry
    ):
        out.append(choice.delay)
        crashes = (*crashes, now)
        now += choice.delay
    assert choice == GiveUp(looped=True)
    return out


def test_crash_loop_is_given_up_after_five_restarts_within_the_promised_waits():
    assert waits(1.0) == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert waits(0.0) == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert sum(waits(1.0)) == 15.5
    assert sum(waits(0.0)) == 7.75


def test_failure_that_cannot_heal_is_never_tried_again():
    assert decide((), 0.0, heals=False, jitter=0.5, policy=POLICY) == GiveUp(looped=False)


def test_crashes_older_than_the_window_do_not_count():
    old = tuple(float(t) for t in range(5))
    assert isinstance(decide(old, 119.0, heals=True, jitter=0.5, policy=POLICY), Retry | GiveUp)
    assert decide(old, 120.0, heals=True, jitter=1.0, policy=POLICY) == Retry(8.0, 5)
    assert decide(old, 125.0, heals=True, jitter=1.0, policy=POLICY) == Retry(0.5, 1)


@given(
    crashes=st.lists(st.floats(0, 1e6), max_size=20).map(sorted),
    after=st.floats(0, 1e4),
    jitter=st.floats(0, 1),
)
def test_delay_is_bounded_for_any_history(crashes, after, jitter):
    now = (crashes[-1] if crashes else 0.0) + after
    choice = decide(tuple(crashes), now, heals=True, jitter=jitter, policy=POLICY)
    if isinstance(choice, Retry):
        assert 0.25 <= choice.delay <= 30.0
        assert 1 <= choice.attempt <= POLICY.tries
