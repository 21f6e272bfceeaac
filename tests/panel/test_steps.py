"""After every known failure there is a next step, and its key works on the run screen."""

import pytest

from veloxquant.panel.bindings import KEYS
from veloxquant.panel.steps import next_steps
from veloxquant.supervisor.failures import FAILURES, fault
from veloxquant.supervisor.messages import LaunchSpec

SPEC = LaunchSpec(model="/m", method="kivi", context=32_768, port=8000)
RUN_KEYS = {key.action: key.keys for key in KEYS if key.area == "run"}


@pytest.mark.parametrize("code", FAILURES)
@pytest.mark.parametrize("spec", [SPEC, None])
def test_every_failure_has_steps_with_working_keys(code, spec):
    steps = next_steps(fault(code), spec)
    assert len(steps) >= 3
    for step in steps:
        if step.action == "again":
            assert step.spec is not None
            assert step.spec != spec
        else:
            assert step.key == RUN_KEYS[step.action]
    keys = [step.key for step in steps if step.key]
    assert len(keys) == len(set(keys))


def test_memory_offers_less_memory_first():
    steps = next_steps(fault("killed"), SPEC)
    assert steps[0].spec.method == "turboquant_rvq"
    assert steps[1].spec.context == 16_384
    assert steps[1].spec.method == "kivi", "one change at a time"


def test_port_offers_the_next_one_first():
    assert next_steps(fault("port_taken"), SPEC)[0].action == "next_port"


def test_models_that_are_gone_are_not_started_again():
    actions = [step.action for step in next_steps(fault("model_missing"), SPEC)]
    assert actions[:2] == ["other_model", "demo"]
    assert "restart" not in actions
