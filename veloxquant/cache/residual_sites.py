"""Where a model's decoder layers show the residual stream: found out by running two tokens.

No list of architectures. Every module notes its calls while recorders take the model's keys. Around
the innermost call that reached a recorder, pairs of a module and the one that called it are tried
from inside out: does the stream after attention, less what the outer one was given, equal what the
inner one returned? The stream after attention is what the next norm reads, or in layers whose parts
run side by side the sum of what was given and returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn

from veloxquant.cache.probe import (
    PROBE_TOKENS,
    ModelPlan,
    Path,
    native_caches,
    replace_plain,
)
from veloxquant.cache.recorder import Recorder
from veloxquant.cache.residual import Site, first_array
from veloxquant.cache.watched import Changed, become, calling, put_back

ROUNDINGS = 8
"""Roundings of the model's type that a sum may be off by."""


@dataclass(eq=False)
class _Call:
    """One call of a module; arrays are told apart by identity, as the layer passes them on."""

    module: Any
    given: tuple[Any, ...]
    out: mx.array | None = None
    inner: list[_Call] = field(default_factory=list)

    @property
    def source(self) -> mx.array | None:
        """The first array it was given."""
        return first_array(self.given)


class _NotingRecorder(Recorder):
    """Also keeps the calls that were under way when keys came."""

    def __init__(self, calls: list[_Call], *, views: bool) -> None:
        super().__init__(views=views)
        self._calls = calls
        self.under_way: list[_Call] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self.under_way = list(self._calls)
        return super().update_and_fetch(keys, values)


def sites_of(plan: ModelPlan) -> Mapping[Path, Site]:
    """Sites of a plan, found when first asked for."""
    if plan.sites is None:
        plan.sites = find_sites(plan)
    return plan.sites


def all_show(plan: ModelPlan) -> bool:
    """Whether every compressed layer shows the stream: cosines compare with cosines only."""
    return len(sites_of(plan)) == plan.compressed


def find_sites(plan: ModelPlan) -> Mapping[Path, Site]:
    """Sites of the compressed entries of a model; those whose layer is not understood are missing.

    Runs two tokens through the model.
    """
    stack: list[_Call] = []
    recorders: dict[Path, _NotingRecorder] = {}
    wanted = {layer.path for layer in plan.layers if layer.kind == "compressed"}

    def make(path: Path) -> Recorder:
        recorders[path] = _NotingRecorder(stack, views=plan.returns == "views")
        return recorders[path]

    if not wanted or not isinstance(plan.model, nn.Module):
        return {}
    caches = [replace_plain(c, (i,), make) for i, c in enumerate(native_caches(plan.model))]
    with _noted_calls(plan.model, stack):
        # Two different tokens: equal streams would hide what attention mixes.
        mx.eval(plan.model(mx.arange(1, PROBE_TOKENS + 1)[None], cache=caches))
    sites = {
        path: site
        for path in wanted
        if (site := _site(recorders[path].under_way, recorders[path])) is not None
    }
    return _unshared(sites)


def _unshared(sites: Mapping[Path, Site]) -> dict[Path, Site]:
    """Those whose modules belong to no other one: a module can become but one thing."""
    modules = [id(m) for site in sites.values() for m in (site.layer, site.after)]
    return {
        path: site
        for path, site in sites.items()
        if modules.count(id(site.layer)) == modules.count(id(site.after)) == 1
    }


# ---- noting calls ---------------------------------------------------------------------------


@contextmanager
def _noted_calls(model: Any, stack: list[_Call]) -> Iterator[None]:
    changed: list[Changed] = []
    try:
        modules = {id(m): m for m in model.modules()}.values()
        changed.extend(become(m, _noting(type(m), stack)) for m in modules)
        yield
    finally:
        put_back(changed)
        stack.clear()


def _noting(base: Any, stack: list[_Call]) -> type:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = _Call(self, (*args, *kwargs.values()))
        if stack:
            stack[-1].inner.append(call)
        stack.append(call)
        try:
            out = base.__call__(self, *args, **kwargs)
        finally:
            stack.pop()
        call.out = first_array(out if isinstance(out, tuple | list) else (out,))
        return out

    return calling(base, __call__)


# ---- reading them ---------------------------------------------------------------------------


def _site(under_way: Sequence[_Call], recorder: Recorder) -> Site | None:
    """The innermost pair of calls that adds up."""
    for outer, attention in zip(under_way[-2::-1], under_way[:0:-1], strict=True):
        if _gets(outer.given, recorder) and (site := _adds_up(outer, attention)) is not None:
            return site
    return None


def _gets(given: Sequence[Any], recorder: Recorder) -> bool:
    return any(v is recorder or _gets(getattr(v, "caches", ()), recorder) for v in given)


def _adds_up(layer: _Call, attention: _Call) -> Site | None:
    x, out = layer.source, attention.out
    if x is None or out is None or x.ndim != 3 or x.shape != out.shape:
        return None
    place = layer.inner.index(attention)
    before, later = layer.inner[:place], layer.inner[place + 1 :]
    once = [c for c in later if sum(d.module is c.module for d in layer.inner) == 1]
    # What the layer passes on from part to part is no new stream.
    known = {id(c.out) for c in layer.inner} | {id(c.source) for c in (*before, attention)}
    reading = next((c for c in later if id(c.source) not in known), None)
    stream = None if reading is None else reading.source
    added = [c for c in once if c.source is out and c.out is not None and c.out.shape == x.shape]
    added.append(attention)
    for part in added:
        assert part.out is not None
        if stream is not None and reading in once and _is_sum(stream, x, part.out, None):
            return Site(layer.module, reading.module, is_added=False)
    for part in added:
        beside = [c for c in layer.inner if c not in (part, attention) and c.out is not None]
        for other in beside:
            for total in (stream, layer.out):
                if total is not None and _is_sum(total, x, part.out, other.out):
                    return Site(layer.module, part.module, is_added=True)
    return None


def _is_sum(total: mx.array, x: mx.array, part: mx.array | None, beside: mx.array | None) -> bool:
    """Whether `total` is x and `part`, and what runs beside it, within the roundings of its type.

    A part alone may carry a factor, as some models scale what they add.
    """
    shapes = {a.shape for a in (total, x, part, beside) if a is not None}
    if part is None or len(shapes) != 1:
        return False
    y, a, b = (v.astype(mx.float32) for v in (total, x, part))
    change = y - a
    if beside is None:
        b = b * ((change * b).sum() / mx.maximum((b * b).sum(), 1e-30))
        rest, parts = change - b, mx.abs(b)
    else:
        c = beside.astype(mx.float32)
        rest, parts = change - b - c, mx.abs(b) + mx.abs(c)
    off = ROUNDINGS * mx.finfo(total.dtype).eps * (mx.abs(y) + mx.abs(a) + parts)
    slack = 1e-3 * mx.abs(change).max()
    return bool(((mx.abs(rest) <= off + slack).all() & (mx.abs(b).max() > 0)).item())
