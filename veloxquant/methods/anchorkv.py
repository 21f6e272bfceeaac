"""anchorkv: a few exact tokens, the others as multiples of them, some with a coded residual.

Each block keeps its anchors exactly: the token most like the others, then those least like the ones
picked. The first token of a sequence is exact too. Every other token is a factor times
the anchor whose key is most parallel. Where most would be lost, up to `anchorkv_rho` of the tokens,
the residuals of key and value are coded in a rotated codebook; not where both are shorter than
`anchorkv_theta` of their row. The newest tokens and the unfinished block are exact, on average 64
tokens besides the window: a block is coded once its last token has left that. The first block is
short, by as much as lets just the window be exact at multiples of a block; its places for residuals
are as many as those of the others. Numbers of anchors stand once for keys and values.
Values have no reason to be parallel to an anchor: at the documented settings turboquant_mse keeps
more of them in about the same space.
Source: none under this name; a design of this library.
"""

from typing import cast

import mlx.core as mx

from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.tiered import anchorkv_plan
from veloxquant.cache.paired import ClassStore, PairedCache, PairedStream
from veloxquant.cache.plans import StreamPlan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.anchored import AnchorCodec, Choice, choose
from veloxquant.quantizers.base import Codec, Packed
from veloxquant.quantizers.sizes import LayerShape


class AnchorStore(ClassStore):
    """Blocks that refer to anchors of their own and of earlier blocks.

    `lender` holds the numbers of anchors and the classes of tokens where this store does not.
    """

    def __init__(self, codec: AnchorCodec, step: int) -> None:
        super().__init__(codec, step)
        self.lender: AnchorStore | None = None

    def _packed(self) -> Packed:
        return super()._packed() | self._lent(0, self.capacity)

    def _part(self, start: int, stop: int) -> Packed:
        return super()._part(start, stop) | self._lent(start, stop)

    def _lent(self, start: int, stop: int) -> Packed:
        lender = self.lender
        if lender is None:
            return {}
        assert stop <= lender.capacity, "keys went before the values that read their numbers"
        return {name: lender._range(name, start, stop) for name in self.anchored.lent}

    @property
    def live(self) -> list:
        """As in every store, without what the lender holds."""
        return [self._start, self._stop, self.capacity, {**self._arrays, **self._fitted}]

    @property
    def anchored(self) -> AnchorCodec:
        """The codec, which knows anchors."""
        return cast(AnchorCodec, self.codec)

    def led(self, x: mx.array) -> mx.array:
        """Rows (B, H, n, D) that come next as whole blocks: the first one has room in front."""
        lead = 0 if self.length else self.anchored.spec.lead
        return mx.pad(x, [(0, 0), (0, 0), (lead, 0), (0, 0)]) if lead else x

    def append(self, x: mx.array) -> None:
        """Encode and add (B, H, n, D), which fill blocks behind the lead of the first one."""
        if not x.shape[2]:
            return
        super().append(self.led(x))
        self._start = self.anchored.spec.lead

    def _is_whole(self, start: int, stop: int) -> bool:
        lead = self.anchored.spec.lead if stop else 0
        return start == lead and stop % self.anchored.spec.size == 0

    def _encode(self, x: mx.array) -> Packed:
        assert self.marks is not None
        return self.anchored.encode_chosen(x, self.marks, self.anchors(x))

    def anchors(self, like: mx.array) -> mx.array:
        """Anchors so far, (B, H, a, D), in the type of `like`."""
        if not self.length:
            return like[:, :, :0]
        return self._range("a", 0, self._stop)

    def residual_norms(self) -> mx.array | None:
        """Norms of the coded residuals, 0 for places not used; None without any place."""
        norms = self._packed().get("n0")
        return norms[:, :, : self.anchored.axes["n0"].at(self._stop)] if norms is not None else None


class AnchorStream(PairedStream):
    """A stream whose body knows its anchors."""

    def __init__(self, plan: StreamPlan, dim: int, codec: Codec | None = None) -> None:
        super().__init__(plan, dim, codec)
        self.body = AnchorStore(cast(AnchorCodec, self.body.codec), self.body.step)

    def due(self, x: mx.array) -> mx.array | None:
        """Rows that appending (B, H, n, D) would move into the body, as whole blocks."""
        rows = super().due(x)
        return None if rows is None else cast(AnchorStore, self.body).led(rows)


class AnchorKVKVCache(PairedCache):
    """Blocks of anchors and projected tokens behind an exact window."""

    stream_type = AnchorStream

    def __init__(self, config: KVCacheConfig, shape: LayerShape) -> None:
        super().__init__(anchorkv_plan(config), shape, config.method)
        self.theta = config.anchorkv_theta
        keys, values = self._bodies()
        values.lender = keys

    def _bodies(self) -> tuple[AnchorStore, AnchorStore]:
        return (
            cast(AnchorStore, self.keys_stream.body),
            cast(AnchorStore, self.values_stream.body),
        )

    def drop(self, n: int) -> int:
        """Rewind both streams: values first, which read the numbers of the keys."""
        if n:
            self.values_stream.trim(n)
            self.keys_stream.trim(n)
        return n

    def choose(self, keys: mx.array, values: mx.array | None, *, first: bool) -> Choice:
        """Anchors and residual places that keys and values share."""
        del first
        assert values is not None
        k_body, v_body = self._bodies()
        before = (k_body.anchors(keys), v_body.anchors(values))
        return choose(keys, values, before, k_body.anchored.spec, self.theta)

    # ---- counters of the documents ------------------------------------------------------

    @property
    def anchorkv_bytes(self) -> int:
        """Bytes held, the exact window and growth steps included."""
        return self.nbytes

    @property
    def full_seq_bytes(self) -> int:
        """Bytes that all tokens would take in 16 bits."""
        return self.full_bytes()

    @property
    def compression_ratio(self) -> float:
        """16-bit bytes of all tokens over the bytes held; 1.0 while empty."""
        return self.effective_compression_ratio

    @property
    def tokens_kept(self) -> int:
        """Tokens held: all of them."""
        return self.rows

    @property
    def tokens_total(self) -> int:
        """Tokens fed, minus tokens rewound."""
        return self.offset

    @property
    def n_anchor_total(self) -> int:
        """Anchors of one head."""
        body = self._bodies()[0]
        return body.blocks * body.anchored.spec.anchors

    @property
    def n_residual_total(self) -> int:
        """Tokens with a coded residual, over all heads and sequences; counts them."""
        norms = [body.residual_norms() for body in self._bodies()]
        if norms[0] is None or norms[1] is None:
            return 0
        used = (norms[0] != 0) | (norms[1] != 0)
        return cast(int, used.sum().item())


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> AnchorKVKVCache:
    """The cache of one layer."""
    return AnchorKVKVCache(config, shape)
