"""Streams whose blocks get their widths by head, keys first and values after them."""

from typing import cast

import mlx.core as mx

from veloxquant.cache.plans import StreamPlan
from veloxquant.cache.store import Store
from veloxquant.cache.stream import Stream
from veloxquant.quantizers.base import Codec, Packed
from veloxquant.quantizers.head_bits import HeadBitsChannelCodec, HeadBitsTokenCodec


class HeadStore(Store):
    """Blocks in widths by head: keys choose them by their statistics, values follow `leader`."""

    def __init__(self, codec: Codec, step: int) -> None:
        super().__init__(codec, step)
        self.leader: HeadStore | None = None

    def _encode(self, x: mx.array) -> Packed:
        codec, group = self.codec, self.codec.spec.block
        first = self._stop // group
        if isinstance(codec, HeadBitsChannelCodec):
            return codec.encode_after(x, self._arrays, first)
        assert self.leader is not None
        units = self.leader.units()[:, :, first : first + x.shape[2] // group]
        return cast(HeadBitsTokenCodec, codec).encode_units(x, units, first)

    def units(self) -> mx.array:
        """Units above the lowest width of the blocks held: (B, H, blocks)."""
        return self._arrays["n"][:, :, : self.length // self.codec.spec.block] & 255


class HeadStream(Stream):
    """A stream with such a store as its body."""

    body: HeadStore

    def __init__(self, plan: StreamPlan, dim: int, codec: Codec | None = None) -> None:
        super().__init__(plan, dim, codec)
        self.body = HeadStore(self.body.codec, self.body.step)
