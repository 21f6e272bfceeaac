import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from veloxquant.supervisor.effects import (
    Drain,
    Limits,
    Publish,
    RefusedError,
    Release,
    Signal,
    Spawn,
)
from veloxquant.supervisor.failures import fault
from veloxquant.supervisor.lifecycle import ALIVE, Machine
from veloxquant.supervisor.messages import LaunchSpec, StageReport

SPEC = LaunchSpec("/models/a", port=8001)
OTHER = LaunchSpec("/models/b", port=8001)
LIMITS = Limits()


def phases(effects) -> list[str]:
    return [e.state.phase for e in effects if isinstance(e, Publish)]


def ready_machine(now: float = 0.0) -> Machine:
    machine = Machine()
    machine.start(now, SPEC)
    machine.spawned(now, 100, 8001)
    machine.greeted(now)
    machine.ready(now, 8001, [])
    return machine


def test_start_goes_through_its_phases_to_ready_and_busy():
    machine = Machine()
    assert Spawn(SPEC) in machine.start(0.0, SPEC, "panel")
    machine.spawned(0.1, 100, 8001)
    assert phases(machine.greeted(0.2)) == ["loading"]
    machine.progressed(0.3, StageReport("weights", "now", "model", 1, 2))
    assert phases(machine.ready(1.0, 8001, ["slow"])) == ["ready"]
    state = machine.state(1.0)
    assert (state.pid, state.port, state.warnings, state.ready_at) == (100, 8001, ["slow"], 1.0)
    assert [s.state for s in state.stages] == ["done"] * 6
    assert phases(machine.load(2.0, running=1)) == ["busy"]
    assert phases(machine.load(3.0, running=0)) == ["ready"]
    assert machine.load(3.1, running=0) == []


def test_calibration_is_told_while_the_server_runs_that_uses_it():
    machine = Machine()
    machine.start(0.0, SPEC)
    machine.spawned(0.1, 1, 8000)
    machine.greeted(0.2)
    machine.ready(0.3, 8000, [], "fitted 2026-11-30, 30 layers")
    assert machine.state(0.4).calibration == "fitted 2026-11-30, 30 layers"
    machine.exited(0.5, -9)
    assert machine.state(0.6).calibration == ""


def test_start_again_with_the_same_spec_does_nothing_with_another_is_refused():
    machine = ready_machine()
    assert machine.start(1.0, SPEC) == []
    with pytest.raises(RefusedError, match="already ready") as refused:
        machine.start(1.0, OTHER)
    assert refused.value.code == "already_running"


def test_stop_of_an_idle_server_drains_then_terminates_then_kills():
    machine = ready_machine()
    assert Drain(10.0) in machine.stop(1.0, 10.0)
    assert machine.tick(5.0) == []
    assert machine.drained(6.0) == [Signal("term")]
    assert machine.tick(11.6) == []
    assert machine.tick(11.7) == [Signal("kill")]
    assert machine.tick(11.9) == []
    effects = machine.exited(12.0, -9)
    assert phases(effects) == ["stopped"]
    assert Release() in effects


def test_stop_without_drain_answer_terminates_at_the_end_of_the_grace():
    machine = ready_machine()
    machine.stop(0.0, 3.0)
    assert machine.tick(2.9) == []
    assert machine.tick(3.0) == [Signal("term")]
    assert machine.tick(3.7) == [Signal("kill")]


def test_second_stop_with_less_grace_shortens_the_first():
    machine = ready_machine()
    machine.stop(0.0, 60.0)
    assert machine.stop(1.0, 0.0) == [Signal("term")]
    assert machine.tick(1.7) == [Signal("kill")]


def test_stop_while_loading_wins_and_does_not_wait_for_the_grace():
    machine = Machine()
    machine.start(0.0, SPEC)
    machine.spawned(0.0, 100, 8001)
    assert Signal("term") in machine.stop(0.5, 10.0)
    assert machine.ready(0.6, 8001, []) == []
    assert machine.tick(0.5 + LIMITS.load_stop + LIMITS.kill_after) == [Signal("kill")]
    assert phases(machine.exited(4.0, -9)) == ["stopped"]


def test_restart_keeps_the_port_and_starts_the_same_spec():
    machine = ready_machine()
    machine.restart(1.0, 5.0)
    effects = machine.exited(2.0, 0)
    assert phases(effects) == ["stopped", "starting"]
    assert Spawn(SPEC) in effects
    assert Release() not in effects


def test_stop_after_restart_wins():
    machine = ready_machine()
    machine.restart(1.0, 5.0)
    machine.stop(1.5, 5.0)
    assert phases(machine.exited(2.0, 0)) == ["stopped"]


def test_crash_waits_then_starts_the_same_spec_again():
    machine = ready_machine()
    effects = machine.exited(1.0, -11, jitter=1.0, last_lines=("boom",))
    assert phases(effects) == ["crashed", "backoff"]
    state = effects[-1].state
    assert state.reason.code == "segfault"
    assert "possibly memory" in state.reason.message
    assert (state.retry_in, state.last_lines) == (0.5, ["boom"])
    assert machine.tick(1.4) == []
    assert Spawn(SPEC) in machine.tick(1.5)
    assert machine.restarts == 1


def test_five_restarts_that_crash_are_given_up_until_a_command():
    machine = Machine()
    now, spawns = 0.0, 0
    effects = machine.start(now, SPEC)
    while machine.phase != "failed":
        spawns += sum(isinstance(e, Spawn) for e in effects)
        machine.spawned(now, 100 + spawns, 8001)
        effects = machine.exited(now, 70, jitter=1.0, last_lines=("why",))
        if machine.phase == "backoff":
            now = machine._retry_at or now
            effects = machine.tick(now)
    assert spawns == 6
    assert now == 15.5
    assert machine.reason is not None
    assert machine.reason.code == "crash_loop"
    assert machine.last_lines == ["why"]
    for later in (20.0, 200.0, 2000.0):
        assert machine.tick(later) == []
    assert Spawn(SPEC) in machine.start(3000.0, SPEC)


def test_counter_is_forgotten_after_a_minute_of_being_ready_only():
    machine = ready_machine(0.0)
    machine.crashes = (0.0,) * 4
    machine.tick(59.0)
    assert len(machine.crashes) == 4
    machine.tick(60.0)
    assert machine.crashes == ()


def test_failure_that_cannot_heal_fails_at_once():
    machine = Machine()
    machine.start(0.0, SPEC)
    machine.spawned(0.0, 100, 8001)
    machine.greeted(0.1)
    machine.fatal(0.2, fault("bad_model", "model.safetensors is cut"))
    effects = machine.exited(0.3, 4)
    assert phases(effects) == ["crashed", "failed"]
    assert effects[1].state.reason.detail == "model.safetensors is cut"


def test_worker_that_says_fatal_but_stays_is_killed():
    machine = ready_machine()
    machine.fatal(1.0, fault("internal"))
    assert machine.tick(2.9) == []
    assert machine.tick(3.0) == [Signal("kill")]


def test_start_without_progress_is_ended_and_progress_renews_the_budget():
    machine = Machine()
    machine.start(0.0, SPEC)
    machine.spawned(0.0, 100, 8001)
    machine.progressed(290.0, StageReport("weights", "now", "model", 1, 9))
    assert machine.tick(300.0) == []
    machine.progressed(305.0, StageReport("canary", "now"))
    for now in (310.0, 330.0, 350.0, 364.0):
        assert machine.tick(now) == []
    assert machine.tick(365.0) == [Signal("kill")]
    effects = machine.exited(366.0, -9, jitter=0.0)
    assert effects[0].state.reason.code == "stalled"
    assert "canary" in effects[0].state.reason.detail


def test_silent_worker_is_flagged_at_ten_seconds_and_killed_at_two_minutes():
    machine = ready_machine(0.0)
    moves = machine.moves
    seen = {float(t): machine.tick(float(t)) for t in range(1, 121)}
    flagged = seen.pop(11.0)
    assert flagged[0].state.unresponsive
    assert flagged[1] == Signal("stack")
    assert seen.pop(120.0) == [Signal("kill")]
    assert set(map(tuple, seen.values())) == {()}
    assert machine.moves == moves  # a flag, not a phase


def test_heartbeat_clears_the_flag():
    machine = ready_machine(0.0)
    machine.tick(5.0)
    machine.tick(11.0)
    effects = machine.heard(12.0)
    assert not effects[0].state.unresponsive
    assert machine.tick(20.0) == []


@pytest.mark.parametrize("phase", ["ready", "loading", "backoff", "stopping"])
def test_sleep_of_the_machine_moves_every_deadline(phase):
    machine = ready_machine(0.0)
    if phase == "loading":
        machine = Machine()
        machine.start(0.0, SPEC)
        machine.spawned(0.0, 1, 1)
        machine.greeted(0.0)
    elif phase == "backoff":
        machine.exited(0.0, 70, jitter=1.0)
    elif phase == "stopping":
        machine.stop(0.0, 10.0)
    machine.tick(0.1)
    assert machine.tick(3600.0) == []
    assert machine.phase == phase
    assert machine.tick(3600.2) == []


def test_broken_protocol_kills_and_plain_end_of_link_waits_for_the_exit():
    machine = ready_machine()
    assert machine.link_lost(1.0, None) == []
    assert machine.tick(1.0 + LIMITS.farewell) == [Signal("kill")]
    machine = ready_machine()
    assert machine.link_lost(1.0, fault("internal", "lies")) == [Signal("kill")]
    assert machine.exited(1.1, -9)[0].state.reason.detail == "lies"


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, the promises hold."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()
        self.now = 0.0
        self.processes = 0
        self.killed = False
        self.failed_moves: int | None = None

    def apply(self, effects) -> None:
        for effect in effects:
            if isinstance(effect, Spawn):
                self.processes += 1
                self.killed = False
                self.apply(self.machine.spawned(self.now, 100, 8001))
            elif isinstance(effect, Signal) and effect.kind != "stack":
                assert self.processes == 1, "a signal without a process"
                self.killed = self.killed or effect.kind == "kill"
            elif isinstance(effect, Release):
                assert self.processes == 0, "released under a living worker"

    @rule(spec=st.sampled_from([SPEC, OTHER]))
    def start(self, spec) -> None:
        self.failed_moves = None
        try:
            self.apply(self.machine.start(self.now, spec))
        except RefusedError:
            assert self.machine.phase in ALIVE

    @rule(grace=st.sampled_from([0.0, 1.0, 10.0]))
    def stop(self, grace) -> None:
        self.failed_moves = None
        self.apply(self.machine.stop(self.now, grace))
        assert self.machine.phase in ("stopped", "stopping")

    @precondition(lambda self: self.machine.spec is not None)
    @rule()
    def restart(self) -> None:
        self.failed_moves = None
        self.apply(self.machine.restart(self.now, 1.0))

    @precondition(lambda self: self.processes == 1)
    @rule(status=st.sampled_from([0, 2, 4, 70, -6, -9, -11, -15]), jitter=st.floats(0, 1))
    def exit(self, status, jitter) -> None:
        self.processes = 0
        self.apply(self.machine.exited(self.now, status, jitter))

    @precondition(lambda self: self.processes == 1)
    @rule(what=st.integers(0, 6))
    def worker_says(self, what) -> None:
        m, now = self.machine, self.now
        says = (
            lambda: m.greeted(now),
            lambda: m.progressed(now, StageReport("weights", "now")),
            lambda: m.ready(now, 8001, []),
            lambda: m.heard(now),
            lambda: m.load(now, 1),
            lambda: m.load(now, 0),
            lambda: m.drained(now),
        )
        self.apply(says[what]())

    @precondition(lambda self: self.processes == 1)
    @rule(protocol=st.booleans())
    def link_lost(self, protocol) -> None:
        self.apply(self.machine.link_lost(self.now, fault("internal") if protocol else None))

    @rule(seconds=st.sampled_from([0.2, 1.0, 11.0, 29.0, 31.0]))
    def pass_time(self, seconds) -> None:
        self.now += seconds
        self.apply(self.machine.tick(self.now))

    @invariant()
    def at_most_one_process_and_only_while_alive(self) -> None:
        assert self.processes <= 1
        assert (self.machine.phase in ALIVE) == (self.processes == 1)
        assert (self.machine.pid is not None) == (self.processes == 1)

    @invariant()
    def failed_is_final_until_a_command(self) -> None:
        if self.failed_moves is not None:
            assert self.machine.phase == "failed"
            assert self.machine.moves == self.failed_moves
        if self.machine.phase == "failed":
            self.failed_moves = self.machine.moves
            assert self.machine.reason is not None

    def teardown(self) -> None:
        """Every start and every stop ends: silence leads to a kill, never to waiting for ever."""
        quiet = Limits()
        was_ready = self.machine.phase in ("ready", "busy") and self.machine._heard_at is None
        if self.processes == 1 and not was_ready:
            for _ in range(40):
                self.now += quiet.slept - 1.0
                self.apply(self.machine.tick(self.now))
            assert self.killed, f"phase {self.machine.phase} never ends"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
