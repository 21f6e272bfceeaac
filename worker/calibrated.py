"""Whether the method that serves uses a calibration, in a few words."""

from collections.abc import Mapping
from typing import Any

from veloxquant.cache.table import row_of
from veloxquant.config.rotations import rotations_file
from veloxquant.worker.caches import CachePlan


def words(plan: CachePlan, model: str, options: Mapping[str, Any]) -> str:
    """What is used, or the command that would fit something; empty for methods that take none.

    Args:
        plan: how the caches of the loaded model are made.
        model: the name that the command line knows it by.
        options: settings of the method; a calibration belongs to its settings.
    """
    method = plan.config.method
    if row_of(method).calibration == "none" or not plan.compressed:
        return ""
    if plan.fitted is None:
        name = plan.config.spectral_model_name
        if method == "spectral" and rotations_file(name).is_file():
            return f"rotations saved as {name!r}, where they fit this model"
        given = "".join(f" --set {name}={_text(value)}" for name, value in options.items())
        return f"none; `vq precompute {model} --method {method}{given}` would fit one"
    when = f" {date}" if (date := plan.fitted.get("fitted")) else ""
    return f"fitted{when}, {plan.compressed} layers"


def _text(value: Any) -> str:
    """A value as `--set` reads it."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
