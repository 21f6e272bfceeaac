"""Stores and streams of a layer that reads codes of another one."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from veloxquant.cache.plans import StreamPlan
from veloxquant.cache.store import Store
from veloxquant.cache.stream import Stream
from veloxquant.quantizers.base import Codec, Packed, saturated
from veloxquant.quantizers.sizes import round_up
from veloxquant.quantizers.together import TogetherCodec


class SharingStore(Store):
    """Own arrays, read together with those that `lender` holds for the group."""

    def __init__(self, codec: Codec, step: int) -> None:
        super().__init__(codec, step)
        self.lender: SharingStore | None = None

    def push(self, packed: Packed, n: int) -> None:
        """Add the codes of `n` tokens; all stores of a group grow alike."""
        if packed:
            self._put(packed, n)
        else:
            self._stop += n
            self.capacity = round_up(self._stop, self.step)

    def set_fitted(self, constants: Packed) -> None:
        """Take constants that were fitted together with the other layers'."""
        self._fitted = {name: mx.contiguous(a) for name, a in constants.items()}

    def _lent(self, start: int, stop: int) -> Packed:
        """Arrays of the lender for buffer positions [start, stop)."""
        if self.lender is None:
            return {}
        codec, lender = cast(TogetherCodec, self.codec), self.lender
        assert stop <= lender.capacity, "a layer of the group was rewound alone"
        whole = start == 0 and stop == lender.capacity
        return {
            name: a if whole else lender._range(name, start, stop)
            for name, a in lender._arrays.items()
            if codec.is_borrowed(name)
        }

    def _packed(self) -> Packed:
        return {**self._lent(0, self.capacity), **super()._packed()}

    @property
    def live(self) -> list:
        """As in every store, without what the lender holds."""
        own = {**self._arrays, **self._fitted}
        return [self._start, self._stop, self.capacity, own]

    def decode(self, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
        """Tokens [start, stop) unpacked: (B, H, stop - start, D)."""
        if self.lender is None:
            return super().decode(start, stop, dtype)
        block = self.codec.spec.block
        low, high = start // block * block, min(round_up(stop, block), self.capacity)
        own = {name: self._range(name, low, high) for name in self._arrays}
        rows = self.codec.decode({**self._lent(low, high), **own, **self._fitted}, dtype)
        return saturated(rows[:, :, start - low : stop - low], dtype)


class SharingStream(Stream):
    """A stream whose rows wait until the whole group can code them."""

    body: SharingStore  # type: ignore[assignment]

    def __init__(self, plan: StreamPlan, dim: int, codec: Codec | None = None) -> None:
        super().__init__(plan, dim, codec)
        self.body = SharingStore(self.body.codec, self.body.step)

    @property
    def is_together(self) -> bool:
        """Whether the body is coded by the group."""
        return isinstance(self.body.codec, TogetherCodec)

    def append(self, x: mx.array) -> None:
        """Add (B, H, n, D) as exact rows."""
        if not self.is_together:
            super().append(x)
            return
        room = self.plan.n_sink - self.sinks.length
        if room > 0:
            self.sinks.append(x[:, :, :room])
            x = x[:, :, room:]
        self.window.append(x)

    def waiting(self, n: int) -> mx.array:
        """The oldest `n` rows that are not coded yet."""
        return self.window.decode(0, n, self._exact_dtype())

    def take_coded(self, packed: Packed, n: int) -> None:
        """Replace the oldest `n` waiting rows by their codes."""
        rest = self.window.decode(n, self.window.length, self._exact_dtype())
        self.body.push(packed, n)
        self.window.replace(rest)
