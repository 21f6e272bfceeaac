"""A growable run of tokens in one codec."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, cast

import mlx.core as mx

from veloxquant.cache.selection import pick_rows
from veloxquant.core.exceptions import CacheStateError
from veloxquant.kernels import dispatch
from veloxquant.kernels.native import PLAIN, NativeRun, decode
from veloxquant.quantizers.base import (
    Codec,
    FittedCodec,
    NativeParts,
    Packed,
    TokenAxis,
    saturated,
)
from veloxquant.quantizers.sizes import round_up
from veloxquant.quantizers.specs.plain import PlainSpec


class _Kind(NamedTuple):
    """Shape and type of an array, without the array."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


@lru_cache(maxsize=256)
def _sample(codec: Codec, heads: int, dtype: mx.Dtype) -> dict[str, _Kind]:
    """What the arrays of one block and the constants look like.

    With every head, since codecs may have constants for each.
    """
    spec = codec.spec
    rows = mx.zeros((1, heads, max(spec.block, spec.fit_tokens), codec.dim), dtype=dtype)
    if not spec.fit_tokens:
        arrays = codec.encode(rows)
    else:
        fitted = (codec := cast(FittedCodec, codec)).fit(rows)
        arrays = {**codec.encode_fitted(rows[:, :, : spec.block], fitted), **fitted}
    return {name: _Kind(a.shape, a.dtype) for name, a in arrays.items()}


def _cut(a: mx.array, axis: int, start: int, stop: int) -> mx.array:
    index = [slice(None)] * a.ndim
    index[axis] = slice(start, stop)
    return a[tuple(index)]


def _whole(a: mx.array, axis: int) -> mx.array:
    """The array in a buffer of its own size, whatever it was cut from along `axis`.

    What `mx.contiguous` finds contiguous, and not much smaller than its buffer, it leaves there.
    """
    long = next((i for i in reversed(range(a.ndim)) if a.shape[i] > 1), None)
    if math.prod(a.shape[:axis]) > 1 or long is None:
        return mx.contiguous(a)
    return mx.concatenate([_cut(a, long, 0, 1), _cut(a, long, 1, a.shape[long])], axis=long)


class Store:
    """Tokens of keys or of values, packed, in buffers that grow by `step` tokens.

    Buffers are written in place: nothing else may hold a reference to them when `append` runs, or
    MLX copies the whole buffer. An empty store holds nothing. Tokens dropped at the front stay in
    the buffer until `step` of them can go at once.
    """

    def __init__(self, codec: Codec, step: int) -> None:
        self.codec = codec
        self.step = step
        self.capacity = 0
        self._start = 0
        self._stop = 0
        self._arrays: Packed = {}
        self._fitted: Packed = {}

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._stop - self._start

    @property
    def is_exact(self) -> bool:
        """Whether rows are held as they came."""
        return isinstance(self.codec.spec, PlainSpec)

    # ---- size ---------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, growth steps included."""
        return sum(a.nbytes for a in self.arrays())

    def arrays(self) -> Iterator[mx.array]:
        """Every buffer held."""
        yield from self._arrays.values()
        yield from self._fitted.values()

    @property
    def fitted(self) -> Packed:
        """Constants fitted to the first tokens; empty for codecs without any, and before that."""
        return self._fitted

    # ---- writing ------------------------------------------------------------------------

    def append(self, x: mx.array) -> None:
        """Encode and add (B, H, n, D); n must be a multiple of the codec's block."""
        n = x.shape[2]
        if n == 0:
            return
        block = self.codec.spec.block
        assert n % block == 0, f"{n} tokens do not fill blocks of {block}"
        self._put(self._encode(x), n)

    def _encode(self, x: mx.array) -> Packed:
        count = self.codec.spec.fit_tokens
        if not count:
            return self.codec.encode(x)
        codec = cast(FittedCodec, self.codec)
        if not self._fitted:
            assert x.shape[2] >= count, f"{x.shape[2]} first tokens, fitting takes {count}"
            self._fitted = {n: mx.contiguous(a) for n, a in codec.fit(x[:, :, :count]).items()}
        return codec.encode_fitted(x, self._fitted)

    def _put(self, packed: Packed, n: int) -> None:
        end = self._stop + n
        if not self._arrays and n == round_up(n, self.step):
            # Assigning over a whole buffer keeps the given array instead, which may be a slice
            # that holds a longer one.
            axes = self.codec.axes
            self._arrays = {name: _whole(new, axes[name].axis) for name, new in packed.items()}
            self._stop = self.capacity = n
            return
        if end > self.capacity:
            self._grow(packed, round_up(end, self.step))
        for name, new in packed.items():
            place = self.codec.axes[name]
            index = [slice(None)] * new.ndim
            index[place.axis] = slice(place.at(self._stop), place.at(end))
            self._arrays[name][tuple(index)] = new
        self._stop = end

    def _grow(self, like: Packed, capacity: int) -> None:
        for name, new in like.items():
            place = self.codec.axes[name]
            shape = list(new.shape)
            old = self._arrays.get(name)
            have = 0 if old is None else old.shape[place.axis]
            shape[place.axis] = place.at(capacity) - have
            room = mx.zeros(shape, dtype=new.dtype)
            self._arrays[name] = (
                room if old is None else mx.concatenate([old, room], axis=place.axis)
            )
        self.capacity = capacity

    def clear(self, *, constants: bool = True) -> None:
        """Forget every token and release the buffers; fitted constants too unless told not to."""
        self._arrays = {}
        if constants:
            self._fitted = {}
        self._start = self._stop = self.capacity = 0

    def replace(self, x: mx.array) -> None:
        """Hold exactly the tokens of (B, H, n, D); released when n is 0."""
        self.clear()
        self.append(x)

    def trim(self, n: int) -> int:
        """Drop the newest `n` tokens; returns how many were dropped.

        Buffers that are more than one step too large shrink, so that dropped tokens free memory.
        """
        n = max(0, min(n, self.length))
        block = self.codec.spec.block
        whole = n in (0, self.length) or (self._stop - n) % block == 0
        assert whole, f"cannot cut inside a block of {block} tokens"
        self._stop -= n
        if self.length == 0:
            self.clear()
        elif self.capacity > round_up(self._stop, self.step):
            self._window(0, round_up(self._stop, self.step))
        return n

    def drop_front(self, n: int) -> None:
        """Forget the oldest `n` tokens; their room is given back `step` tokens at a time."""
        assert self.codec.spec.block == 1
        assert n <= self.length
        self._start += n
        if self.length == 0:
            self.clear()
        elif self._start >= self.step:
            self._window(self._start, self._start + round_up(self.length, self.step))

    def _window(self, start: int, stop: int) -> None:
        """Move buffer positions [start, stop) into buffers of just that size."""
        stop = min(stop, self.capacity)
        for name, a in self._arrays.items():
            place = self.codec.axes[name]
            part = _cut(a, place.axis, place.at(start), place.at(stop))
            self._arrays[name] = _whole(part, place.axis)
        self.capacity = stop - start
        self._start -= start
        self._stop -= start

    def take(self, index: mx.array) -> None:
        """Keep the tokens at (B, H, n) ascending indices, each head its own.

        Raises:
            TypeError: when the codec shares scales among tokens.
        """
        if not self.codec.spec.token_local:
            raise TypeError(f"tokens of a {self.codec.spec.name} store cannot be picked one by one")
        n = index.shape[-1]
        if not n:
            self.clear()
            return
        if self._start:
            index = index + self._start
        capacity = round_up(n, self.step)
        if capacity > n:
            # The last token once more for the room behind it: buffers are written once, not thrice.
            last = mx.broadcast_to(index[..., -1:], (*index.shape[:2], capacity - n))
            index = mx.concatenate([index, last], axis=-1)
        self._arrays = {name: pick_rows(a, index) for name, a in self._arrays.items()}
        self._start, self._stop, self.capacity = 0, n, capacity

    # ---- reading ------------------------------------------------------------------------

    def scores(self, q: mx.array) -> mx.array:
        """Products of queries (B, H, M, D) with the tokens held: (B, H, M, length)."""
        out = self.codec.scores(q, self._packed())
        return out if self.capacity == self.length else out[..., self._start : self._stop]

    def mix(self, w: mx.array) -> mx.array:
        """Weighted sum of the tokens held, weights (B, H, M, length): (B, H, M, D)."""
        if self.capacity != self.length:
            room = (self._start, self.capacity - self._stop)
            w = mx.pad(w, [(0, 0)] * (w.ndim - 1) + [room])
        return self.codec.mix(w, self._packed())

    def native(self) -> NativeParts | None:
        """The tokens held, as the compiled kernel reads them; None if it cannot."""
        return self.codec.native(self._packed(), self._start, self._stop)

    def _packed(self) -> Packed:
        """Codes and constants together, as codecs read them."""
        return {**self._arrays, **self._fitted} if self._fitted else self._arrays

    def decode(self, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
        """Tokens [start, stop) unpacked: (B, H, stop - start, D).

        For codecs with blocks only whole blocks are unpacked and then cut.
        """
        start, stop = start + self._start, stop + self._start
        if (rows := self._decode_native(start, stop)) is not None:
            return saturated(rows, dtype)
        block = self.codec.spec.block
        low, high = start // block * block, min(round_up(stop, block), self.capacity)
        part = self._part(low, high)
        rows = self.codec.decode({**part, **self._fitted}, dtype)[:, :, start - low : stop - low]
        return rows if self.is_exact else saturated(rows, dtype)

    def _decode_native(self, start: int, stop: int) -> mx.array | None:
        """Buffer positions [start, stop) through the compiled kernel, None if it cannot."""
        if not dispatch.decodes_natively(stop - start):
            return None
        run = self.codec.native(self._packed(), start, stop)
        if not isinstance(run, NativeRun) or run.kind == PLAIN:
            return None
        mx.eval(list(self._arrays.values()))
        elements = (stop - start) * run.width * run.data.shape[0] * run.data.shape[1]
        out = decode(run, run.dim or self.codec.dim, dispatch.threads(elements))
        if out is None:
            return None
        rows = mx.array(out)
        return rows if run.basis is None else run.basis.unrotate(rows)

    def _part(self, start: int, stop: int) -> Packed:
        """Codes at buffer positions [start, stop)."""
        return {name: self._range(name, start, stop) for name in self._arrays}

    def _range(self, name: str, start: int, stop: int) -> mx.array:
        place: TokenAxis = self.codec.axes[name]
        return _cut(self._arrays[name], place.axis, place.at(start), place.at(stop))

    # ---- saving -------------------------------------------------------------------------

    @property
    def live(self) -> list:
        """Counters and buffers as they are: what `adopt` takes over without copying."""
        return [self._start, self._stop, self.capacity, dict(self._packed())]

    def check(self, saved: list, batch: int, heads: int, dtype: mx.Dtype) -> int:
        """Tokens in what `live` or `compact` gave, once it is sure that it fits this store.

        Raises:
            CacheStateError: when counters, names, shapes or types are not those of this codec, or
                values used as indices point outside; kernels read these buffers by address and
                believe them.
        """
        start, stop, capacity, arrays = saved
        arrays = arrays or {}
        counters = (start, stop, capacity)
        if not all(type(n) is int for n in counters) or not 0 <= start <= stop <= capacity:
            raise CacheStateError(f"counters {counters} of a store are impossible")
        block = self.codec.spec.block
        if capacity % block or not self._is_whole(start, stop):
            raise CacheStateError(f"counters {counters} cut a block of {block} tokens")
        if not capacity and not arrays:
            return 0
        for name, like in _sample(self.codec, heads, dtype).items():
            shape = [batch, heads, *like.shape[2:]]
            if place := self.codec.axes.get(name):
                shape[place.axis] = place.at(capacity)
            held = arrays.get(name)
            found = held is not None and (tuple(held.shape), held.dtype)
            if found != (tuple(shape), like.dtype):
                raise CacheStateError(
                    f"array {name!r} should be {like.dtype} of {tuple(shape)}, it is {found}"
                )
        self._check_places(arrays)
        return stop - start

    def _is_whole(self, start: int, stop: int) -> bool:
        """Whether places [start, stop) are what blocks hold."""
        block = self.codec.spec.block
        return block == 1 or (start == 0 and stop % block == 0)

    def _check_places(self, arrays: Packed) -> None:
        """Make sure that what is used as an index points inside; nothing behind this looks."""
        for name, limit in self.codec.limits.items():
            a = arrays[name]
            if a.size and (largest := cast(int, a.max().item())) >= limit:
                raise CacheStateError(
                    f"array {name!r} is damaged: it points to place {largest} of {limit}"
                )
        if (fault := self.codec.fault(arrays)) is not None:
            raise CacheStateError(fault)

    def adopt(self, saved: list) -> None:
        """Take over what `live` or `compact` gave; `check` comes first."""
        start, stop, capacity, arrays = saved
        # New handles: writing in place here must not show through in the saved arrays.
        own = {name: a[...] for name, a in (arrays or {}).items()}
        self._arrays = {name: a for name, a in own.items() if name in self.codec.axes}
        self._fitted = {name: a for name, a in own.items() if name not in self.codec.axes}
        self._start, self._stop, self.capacity = int(start), int(stop), int(capacity)

    def compact(self) -> list:
        """As `live`, with buffers cut to the blocks of the tokens held: what goes into a file."""
        if self.length == 0:
            return [0, 0, 0, {}]
        block = self.codec.spec.block
        low, high = self._start // block * block, round_up(self._stop, block)
        cut = {name: self._range(name, low, high) for name in self._arrays}
        return [self._start - low, self._stop - low, high - low, {**cut, **self._fitted}]
