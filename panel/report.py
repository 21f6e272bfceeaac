"""A short report of a failure for a bug tracker: what ran, what happened, the last lines."""

import re

from veloxquant.panel.state import View
from veloxquant.panel.text import clean
from veloxquant.panel.widgets.clock import wall_clock

_PATHS = re.compile(r"(?<![\w:/])~?/(?:[^\s/:'\"]+/)+")
_SECRETS = re.compile(r"\b(?:hf_|sk-|vq-)[A-Za-z0-9_-]{8,}|(?<=[Bb]earer )\S+")


def without_paths(text: str) -> str:
    """Folders become `.../`, tokens become `[removed]`; file names stay."""
    return _SECRETS.sub("[removed]", _PATHS.sub(".../", text))


def report_of(view: View) -> str:
    """The report, safe to paste: no folders, no tokens, no prompts."""
    spec, fault = view.refused_spec or view.spec, view.fault
    lines = [f"state: {view.server.phase}, restarts {view.server.restarts}"]
    if spec is not None:
        lines.append(
            f"asked: {view.model_name} method={clean(spec.method, 40)} context={spec.context} "
            f"batch={spec.batch} port={spec.port} options={clean(spec.options, 400)}"
        )
    if fault is not None:
        lines.append(f"fault: {clean(fault.code, 40)}: {clean(fault.message, 400)}")
        if fault.detail:
            lines.append(f"detail: {clean(fault.detail, 1000)}")
    if view.stats is not None:
        stats = view.stats
        lines.append(
            f"last figures: footprint={stats.footprint} weights={stats.weights} "
            f"kv_claimed={stats.kv_claimed} kv_resident={stats.kv_resident} limit={stats.limit}"
        )
    lines += ["last lines:"]
    lines += [
        f"{wall_clock(line.wall)} {line.level} {line.source} {line.text}"
        for line in view.logs[-40:]
    ]
    return without_paths("\n".join(lines))
