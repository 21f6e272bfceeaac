"""How little attention changes the residual stream: cosines that decoder layers give to caches.

A cache sees keys and queries, never the stream. While caches of a model wait for cosines, its
decoder layers and one module in each of them answer to subclasses of their own classes, which look
at what goes in and out and change nothing. Once no such cache is left the classes are put back, so
other methods, and decoding, run the model as it was loaded. Which modules those are is found out by
`cache/residual_sites.py`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from veloxquant.cache.batch import RowBatch
from veloxquant.cache.watched import Changed, become, calling, put_back


class ResidualReader(Protocol):
    """A cache that wants to know how its layer's attention changes the stream."""

    @property
    def awaits_cosines(self) -> bool:
        """Whether it still does."""
        ...

    def take_cosines(self, cosines: mx.array) -> mx.array:
        """Take those of the newest tokens, (B, L) fp32; returns what has to be evaluated."""
        ...


class Site(NamedTuple):
    """Where the stream before and after attention can be seen.

    `layer` is given the stream x. The stream after attention is what the module `after` is given,
    or, if `is_added`, x plus what `after` returns.
    """

    layer: Any
    after: Any
    is_added: bool


def cosines(before: mx.array, after: mx.array) -> mx.array:
    """Cosine of each token's stream before and after attention: (B, L, width) to (B, L) fp32."""
    x, y = before.astype(mx.float32), after.astype(mx.float32)
    # Streams of 16 bits overflow when squared, and so may those of 32 bits: only directions count.
    x = x / mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), 1e-30)
    y = y / mx.maximum(mx.abs(y).max(axis=-1, keepdims=True), 1e-30)
    lengths = mx.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))
    return (x * y).sum(axis=-1) / mx.maximum(lengths, 1e-30)


class ResidualHook:
    """The layers of one model, watched as long as this object lives.

    Waiting caches hold it. It does not keep the model alive.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._first = weakref.ref(sites[0].layer)
        changed: list[Changed] = []
        for site in sites:
            frames = _Frames()
            changed.append(become(site.layer, _watching(type(site.layer), frames)))
            looking = _adding if site.is_added else _reading
            changed.append(become(site.after, looking(type(site.after), frames)))
        self._end = weakref.finalize(self, put_back, changed)
        self._end.atexit = False

    @property
    def is_attached(self) -> bool:
        """Whether the layers are watched."""
        return self._end.alive

    def watches(self, sites: Sequence[Site]) -> bool:
        """Whether it is attached to the model of these sites."""
        return self.is_attached and self._first() is sites[0].layer

    def detach(self) -> None:
        """Put the classes back; caches that still wait will say `proxy`."""
        self._end()

    def __deepcopy__(self, memo: dict[int, Any]) -> ResidualHook:
        """Copies of a waiting cache wait for the same model."""
        return self


_hooks: weakref.WeakSet[ResidualHook] = weakref.WeakSet()
_lock = threading.Lock()


def watch(sites: Sequence[Site]) -> ResidualHook:
    """Watch the layers of a model; the hook of earlier sequences if it still does."""
    with _lock:
        for hook in _hooks:
            if hook.watches(sites):
                return hook
        made = ResidualHook(sites)
        _hooks.add(made)
        return made


def detach_all() -> None:
    """Put every model's classes back."""
    with _lock:
        for hook in list(_hooks):
            hook.detach()


# ---- the subclasses -------------------------------------------------------------------------


class _Frame:
    """One call of a layer."""

    def __init__(self, before: mx.array) -> None:
        self.before = before
        self.after: mx.array | None = None


class _Frames(threading.local):
    """The call of a layer that is under way in this thread."""

    now: _Frame | None = None


def _watching(base: Any, frames: _Frames) -> type:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if not any(c.awaits_cosines for c, _ in _readers(given)):
            return base.__call__(self, *args, **kwargs)
        before = first_array(given)
        assert before is not None, "a decoder layer is given the stream"
        frames.now = frame = _Frame(before)
        try:
            out = base.__call__(self, *args, **kwargs)
        finally:
            frames.now = None
        return out if frame.after is None else _told(given, frame.before, frame.after, out)

    return calling(base, __call__)


def _reading(base: Any, frames: _Frames) -> type:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (frame := frames.now) is not None:
            frame.after = first_array((*args, *kwargs.values()))
        return base.__call__(self, *args, **kwargs)

    return calling(base, __call__)


def _adding(base: Any, frames: _Frames) -> type:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = base.__call__(self, *args, **kwargs)
        if (frame := frames.now) is not None:
            added = first_array(out if isinstance(out, tuple | list) else (out,))
            frame.after = None if added is None else frame.before + added
        return out

    return calling(base, __call__)


def first_array(values: Sequence[Any]) -> mx.array | None:
    """The first array among them."""
    return next((v for v in values if isinstance(v, mx.array)), None)


def _readers(given: Sequence[Any]) -> Iterator[tuple[ResidualReader, int]]:
    """Caches among a layer's arguments that take cosines, each with its row of the batch.

    The row is -1 for a cache that holds all rows of the call.
    """
    for value in given:
        if isinstance(value, RowBatch):
            rows = enumerate(value.rows)
            yield from ((r, i) for i, r in rows if hasattr(r, "awaits_cosines"))
        elif hasattr(value, "awaits_cosines"):
            yield value, -1
        elif (inner := getattr(value, "caches", None)) is not None:
            yield from _readers(inner)


def _told(given: Sequence[Any], before: mx.array, after: mx.array, out: Any) -> Any:
    """Give the cosines to whoever waits; `out`, carrying their evaluation.

    The layer after this one would else run while the streams are still held.
    """
    all_rows, made = cosines(before, after), []
    counts = next((v.counts for v in given if isinstance(v, RowBatch)), None)
    for cache, row in _readers(given):
        if not cache.awaits_cosines:
            continue
        own = all_rows
        if row >= 0:
            own = all_rows[row : row + 1]
            own = own if counts is None else own[:, : counts[row]]
        if own.size:
            made.append(cache.take_cosines(own))
    if not made:
        return out
    if isinstance(out, mx.array):
        return mx.depends([out], made)[0]
    if type(out) is tuple and isinstance(out[0], mx.array):
        return (mx.depends([out[0]], made)[0], *out[1:])
    mx.eval(made)
    return out
