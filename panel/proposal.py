"""What to start when the user only presses enter: what ran last, else what fits best."""

from dataclasses import dataclass

from veloxquant.panel.ports import ModelItem
from veloxquant.supervisor.messages import LaunchSpec

BEST = ("turboquant_rvq", "kivi")
DEFAULT_CONTEXT = 8_192


@dataclass(frozen=True, slots=True)
class Proposal:
    """A start, and why this one."""

    model: ModelItem
    spec: LaunchSpec
    why: str


def propose(models: tuple[ModelItem, ...], last: LaunchSpec | None) -> Proposal | None:
    """The last start if its model is still here, else the first model that can run."""
    if last is not None:
        for model in models:
            if model.path == last.model and model.runnable:
                return Proposal(model, last, "what ran here last")
    for model in models:
        if model.runnable and model.fits_tokens != 0:
            spec = spec_for(model)
            return Proposal(model, spec, "the first model here that fits")
    return None


def spec_for(model: ModelItem, method: str = "", context: int = 0) -> LaunchSpec:
    """A start of `model`; method and context default to what fits best."""
    room = model.fits_tokens or DEFAULT_CONTEXT
    return LaunchSpec(
        model=model.path,
        method=method or model.fits_method or BEST[0],
        context=context or min(DEFAULT_CONTEXT, room),
    )
