"""What can be done after a failure: a pure table from the fault to the next steps."""

from typing import NamedTuple

import msgspec

from veloxquant.supervisor.messages import Fault, LaunchSpec


class Step(NamedTuple):
    """One offer: its key, what it says, the action of the run screen, the start it makes."""

    key: str
    text: str
    action: str
    spec: LaunchSpec | None = None


_MEMORY = frozenset({"does_not_fit", "killed", "segfault", "aborted"})
_METHOD = frozenset({"canary_failed", "unsupported", "usage"})
_MODEL = frozenset({"model_missing", "bad_model"})
_LEAST_CONTEXT = 1_024


def next_steps(fault: Fault, spec: LaunchSpec | None) -> list[Step]:
    """Offers for this fault, the most promising first; the last ones are always there."""
    steps: list[Step] = []
    if fault.code == "port_taken" and spec is not None:
        steps.append(Step("n", f"start on the next free port after {spec.port}", "next_port"))
    if fault.code in _MEMORY and spec is not None:
        if spec.method != "turboquant_rvq":
            smaller = msgspec.structs.replace(spec, method="turboquant_rvq", options={})
            steps.append(Step("", "start with turboquant_rvq, which holds less", "again", smaller))
        half = spec.context // 2
        if half >= _LEAST_CONTEXT:
            less = msgspec.structs.replace(spec, context=half)
            steps.append(Step("", f"start with half the context: {half:,} tokens", "again", less))
        steps.append(Step("f", "see what fits", "other_method"))
    if fault.code in _METHOD and spec is not None:
        if spec.method != "fp16":
            plain = msgspec.structs.replace(spec, method="fp16", options={})
            steps.append(Step("", "start with fp16: no compression, always works", "again", plain))
        steps.append(Step("f", "choose another method", "other_method"))
    if fault.code in _MODEL:
        steps.append(Step("m", "pick another model", "other_model"))
        steps.append(Step("d", "fetch the small demo model", "demo"))
    if spec is not None and fault.code not in _MODEL:
        steps.append(Step("r", "start again with the same settings", "restart"))
    if fault.code not in _MODEL:
        steps.append(Step("m", "pick another model", "other_model"))
    steps.append(Step("l", "look at the whole log", "logs"))
    steps.append(Step("Y", "copy a report of what went wrong", "report"))
    return steps
