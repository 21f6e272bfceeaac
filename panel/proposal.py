"""What to start when the user only presses enter: what ran last, else the first model that fits."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from veloxquant.config.small_models import SMALL_BITS, options_for
from veloxquant.panel.ports import ModelItem
from veloxquant.supervisor.messages import LaunchSpec

DEFAULT = LaunchSpec(model="", method="turboquant_rvq", context=8_192)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A start, and why this one."""

    model: ModelItem
    spec: LaunchSpec
    why: str


def propose(
    models: tuple[ModelItem, ...], last: Mapping[str, object], template: LaunchSpec = DEFAULT
) -> Proposal | None:
    """The last start if its model is still here, else the first model that can run."""
    name = last.get("model")
    for model in models:
        if name and name in (model.name, model.path) and model.runnable:
            method, context = last.get("method"), last.get("context")
            spec = spec_for(
                model,
                method if isinstance(method, str) else "",
                context if isinstance(context, int) else 0,
                template,
            )
            options = last.get("options")
            if method == spec.method and isinstance(options, dict):
                spec = msgspec.structs.replace(spec, options=options)
            return Proposal(model, spec, "what ran here last")
    for model in models:
        if model.runnable and model.fits_tokens != 0:
            return _first(model, spec_for(model, template=template))
    return None


def _first(model: ModelItem, spec: LaunchSpec) -> Proposal:
    """The proposal for a model that never ran here."""
    options = options_for(spec.method, model.params)
    if options and not spec.options:
        why = f"the first that fits here; {SMALL_BITS} bits, since a small model feels fewer"
        spec = msgspec.structs.replace(spec, options=options)
        return Proposal(model, spec, why)
    return Proposal(model, spec, "the first that fits here")


def spec_for(
    model: ModelItem, method: str = "", context: int = 0, template: LaunchSpec = DEFAULT
) -> LaunchSpec:
    """A start of `model`; what is not given comes from the settings, cut to what fits."""
    most = min(model.native_context or template.context, model.fits_tokens or template.context)
    chosen = method or (template.method if template.method != "auto" else model.fits_method)
    return msgspec.structs.replace(
        template,
        model=model.path,
        name=model.name,
        method=chosen or DEFAULT.method,
        context=context or min(template.context, most),
    )
