"""One exact reading of a text, given again to caches of many kinds.

As long as a cache holds every token, keys, values and queries of a text are those of the exact
cache. A method that gives up tokens only when a prompt is complete is therefore brought to the
prompt's end without the model: it gets what the exact reading gave, and sees the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from veloxquant.benchmarks.quality import log_probs
from veloxquant.cache.sampling import Sampler
from veloxquant.cache.view import AttentionCall, CacheView

CHUNK = 256
"""Tokens of a prompt that are read at a time, as serving on a CPU does."""


class TapedLayer(Sampler):
    """An exact cache of one layer that keeps what it is asked, chunk by chunk, from `start` on.

    Where the layers of a model are watched, also how attention changes the residual stream.
    """

    awaits_cosines = True

    def __init__(self, before: TapedLayer | None = None) -> None:
        super().__init__(views=True)
        self.scale = 1.0
        self.cosines: list[mx.array] = []
        if before is not None:
            self.rows, self.offset = before.rows, before.offset
        self.start = self.offset

    def attend(self, call: AttentionCall) -> mx.array:
        """Exact attention, noting queries and their factor."""
        self.scale = call.scale
        return super().attend(call)

    def take_cosines(self, cosines: mx.array) -> mx.array:
        """Keep those of a chunk."""
        self.cosines.append(cosines)
        return cosines


class Tape:
    """What a model gave to the caches of its layers while it read a text.

    Only for models whose layers all have plain caches; the attention hook must be attached.
    """

    def __init__(self, layers: Sequence[TapedLayer]) -> None:
        self.layers = list(layers)

    @classmethod
    def blank(cls, n_layers: int) -> Tape:
        """A tape before the first token."""
        return cls([TapedLayer() for _ in range(n_layers)])

    def branch(self) -> Tape:
        """A tape that goes on from here, and holds only what comes next."""
        return Tape([TapedLayer(layer) for layer in self.layers])

    def read(self, model: Any, tokens: Sequence[int]) -> None:
        """Let the model read a chunk."""
        model(mx.array([list(tokens)]), cache=self.layers)
        mx.eval([x.rows for x in self.layers], [x.asked for x in self.layers])

    def step(self, model: Any, token: int) -> mx.array:
        """Let the model read one token; log-probabilities (1, V) of what comes after it."""
        out = log_probs(model(mx.array([[token]]), cache=self.layers)[:, -1])
        mx.eval(out, [x.rows for x in self.layers], [x.asked for x in self.layers])
        return out

    def play(self, caches: Sequence[Any], *, asked: bool = True) -> None:
        """Give the tape to the caches of all layers, in the chunks that were read.

        Without `asked` they see no queries: for those that look at others later.
        """
        places = [layer.start for layer in self.layers]
        for number in range(len(self.layers[0].asked)):
            for i, (cache, layer) in enumerate(zip(caches, self.layers, strict=True)):
                assert layer.rows is not None
                queries = layer.asked[number]
                stop = places[i] + queries.shape[2]
                keys, values = (x[:, :, places[i] : stop] for x in layer.rows)
                cache.update_and_fetch(keys, values)
                if asked and hasattr(cache, "observe"):  # mlx-lm's own caches look at no queries
                    cache.observe(queries, layer.scale)
                if getattr(cache, "awaits_cosines", False) and layer.cosines:
                    cache.take_cosines(layer.cosines[number])
                places[i] = stop
            mx.eval([cache.state for cache in caches])


def chunks(tokens: Sequence[int]) -> list[Sequence[int]]:
    """The tokens in chunks of `CHUNK`."""
    return [tokens[i : i + CHUNK] for i in range(0, len(tokens), CHUNK)]


class Together:
    """Caches of one layer that are given the same until they give up rows; the first one answers.

    With what `repetition.compress` asks of a cache: one pass that repeats a prompt serves them all.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        self.caches = list(caches)
        self.offset: int = caches[0].offset
        self._fetched: list[tuple[CacheView, CacheView]] = []

    @property
    def rows(self) -> int:
        """Rows held."""
        return self.caches[0].rows

    def make_mask(self, N: int, **rest: Any) -> Any:
        """The mask of the first."""
        return self.caches[0].make_mask(N, **rest)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[CacheView, CacheView]:
        """Give all of them (1, H, L, D); views that come back here."""
        self._fetched = [cache.update_and_fetch(keys, values) for cache in self.caches]
        self.offset = self.caches[0].offset
        return (
            CacheView(self, keys.shape, keys.dtype, is_key=True, own=True),
            CacheView(self, values.shape, values.dtype, is_key=False, own=True),
        )

    def attend(self, call: AttentionCall) -> mx.array:
        """Attention of the first; the others see the queries."""
        keys, values = self._fetched[0]
        out = keys.attend(call.queries, values, call.scale, call.mask, call.sinks)
        for cache in self.caches[1:] if call.owner else ():
            cache.observe(call.queries, call.scale)
        return out

    def begin_probe(self, start: int, stop: int) -> None:
        """All are scored by what comes."""
        for cache in self.caches:
            cache.begin_probe(start, stop)

    def commit(self) -> None:
        """All store what waits."""
        for cache in self.caches:
            cache.commit()

    def end_probe(self) -> None:
        """All take it back."""
        for cache in self.caches:
            cache.end_probe()
        self.offset = self.caches[0].offset

    def prune(self) -> None:
        """All give up rows."""
        for cache in self.caches:
            cache.prune()
