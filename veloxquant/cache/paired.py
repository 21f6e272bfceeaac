"""Caches whose keys and values are coded block by block under one common choice.

The choice, for example which tokens are salient, is made once from the rows of a block and given to
the codecs of both sides, so that the classes of keys and values hold the same tokens in the same
order. Attention sums over tokens and does not mind their order: as long as no mask hides a coded
token, it reads the classes as they lie.
"""

from abc import abstractmethod
from typing import Any, cast

import mlx.core as mx

from veloxquant.cache.attend import Mask, Run
from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.plans import StreamPlan
from veloxquant.cache.store import Store
from veloxquant.cache.stream import Stream
from veloxquant.quantizers.base import Codec, Packed
from veloxquant.quantizers.classed import ClassedCodec


class ClassStore(Store):
    """Blocks of tokens in classes; `marks` is what was chosen for the rows that come next."""

    def __init__(self, codec: ClassedCodec, step: int) -> None:
        super().__init__(cast(Codec, codec), step)
        self.marks: Any = None

    @property
    def classed(self) -> ClassedCodec:
        """The codec, which knows classes."""
        return cast(ClassedCodec, self.codec)

    def _encode(self, x: mx.array) -> Packed:
        codec = self.classed
        if (count := codec.spec.fit_tokens) and not self._fitted:
            self._fitted = {n: mx.contiguous(a) for n, a in codec.fit(x[:, :, :count]).items()}
        assert self.marks is not None
        return codec.encode_marked(x, self.marks, self._fitted)

    @property
    def blocks(self) -> int:
        """Blocks held."""
        return self._stop // self.classed.spec.size

    @property
    def constants(self) -> Packed:
        """What was fitted to the first tokens, empty before."""
        return self._fitted

    def _range(self, name: str, start: int, stop: int) -> mx.array:
        return super()._range(name, 0 if name in self.classed.whole else start, stop)

    def by_class(self) -> list[Store]:
        """The classes as stores that share the buffers of this one; to be read, not written."""
        out, vacant = [], self.classed.spec.vacant()
        for part, arrays in self.classed.by_class(self._packed()):
            view = Store(part.codec, 1)
            view._arrays = {n: a for n, a in arrays.items() if n in part.codec.axes}
            view._fitted = {n: a for n, a in arrays.items() if n not in part.codec.axes}
            view._start, view._stop = vacant[part.number], self.blocks * part.tokens
            view.capacity = self.capacity // self.classed.spec.size * part.tokens
            out.append(view)
        return out


class PairedStream(Stream):
    """A stream whose body knows classes, if its codec does."""

    def __init__(self, plan: StreamPlan, dim: int, codec: Codec | None = None) -> None:
        super().__init__(plan, dim, codec)
        if isinstance(self.body.codec, ClassedCodec):
            self.body = ClassStore(self.body.codec, self.body.step)

    def due(self, x: mx.array) -> mx.array | None:
        """Rows that appending (B, H, n, D) would move into the body, None when there are none."""
        x = x[:, :, max(0, self.plan.n_sink - self.sinks.length) :]
        held = self.body.length + self.window.length
        move = self.plan.schedule.frontier(held + x.shape[2]) - self.body.length
        if move <= 0:
            return None
        if self.window.length:
            x = mx.concatenate([self.window.decode(0, self.window.length, x.dtype), x], axis=2)
        return x[:, :, :move]


class PairedCache(ComposedCache):
    """Keys and values in `[blocks by class][exact window]`; subclasses choose the classes."""

    stream_type = PairedStream
    keys_stream: PairedStream
    values_stream: PairedStream

    @abstractmethod
    def choose(self, keys: mx.array, values: mx.array | None, *, first: bool) -> Any:
        """Classes (B, H, n), or what else the codec takes, of whole blocks of keys and values.

        `values` is None while they are not coded in blocks; `first` says whether the sequence
        begins here.
        """

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Append to both streams, blocks under one choice."""
        bodies = [s.body for s in (self.keys_stream, self.values_stream)]
        classed = [body for body in bodies if isinstance(body, ClassStore)]
        blocks = self.keys_stream.due(keys)
        if blocks is not None:
            both = len(classed) == 2
            marks = self.choose(
                blocks,
                self.values_stream.due(values) if both else None,
                first=self.keys_stream.body.length == 0,
            )
            for body in classed:
                body.marks = marks
        super().write(keys, values)
        for body in classed:
            body.marks = None

    def attended(self, mask: Mask, length: int) -> tuple[list[Run], list[Run]]:
        """The classes one after the other, unless a mask or exact values need the tokens' order."""
        keys, values = self.runs()
        bodies = (self.keys_stream.body, self.values_stream.body)
        ordered = isinstance(mask, mx.array) or not bodies[0].length
        newest = self.rows - bodies[0].length - self.keys_stream.sinks.length
        if ordered or (mask is not None and length > newest + 1):
            return keys, values
        sides: list[list[Run]] = []
        for side, body in zip((keys, values), bodies, strict=True):
            if not isinstance(body, ClassStore):
                return keys, values
            sides.append([r for one in side for r in (body.by_class() if one is body else [one])])
        return sides[0], sides[1]
