"""skvq: channels reordered so that neighbours are alike, clipped groups, sinks and a window exact.

The first `skvq_n_sink` tokens and the newest `skvq_window` stay exact; older ones are quantised
each alone, in groups of reordered channels whose ranges are shrunk a little. Order and clip factor
are fitted to the first window behind the sinks and then kept, or to a text of calibration.
Source: Duanmu et al., SKVQ, 2024, arXiv 2405.06219. Differs: order and clip factor are of each KV
head and fitted online by default, not of a layer; tokens leave the window 32 at a time, so that up
to 31 more are exact, the first when a window lies behind the fitted one; scales have the input's
type, not 8 bits; buffers grow past `skvq_max_ctx`, which is checked and, once, told of.
"""

import logging
from functools import lru_cache

import mlx.core as mx

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.given import fit_sides, given_codecs
from veloxquant.cache.layouts.grouped import skvq_plan
from veloxquant.cache.stream import Stream
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape

_log = logging.getLogger(__name__)


@lru_cache(maxsize=8)
def _tell_of_growth(limit: int) -> None:
    """Say once a limit that a sequence is longer; a generation must not fail in its middle."""
    _log.warning("a sequence is longer than skvq_max_ctx=%d; its cache grows on", limit)


class SKVQKVCache(ComposedCache):
    """Reordered, clipped groups between exact sinks and an exact window."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> None:
        plan = skvq_plan(config)
        codecs = given_codecs(plan, shape, context)
        super().__init__(plan, shape, config.method, codecs)
        self.calibrated = any(codecs)
        """Whether order and clip factor come from a text of calibration."""
        self.max_ctx = config.skvq_max_ctx
        """Tokens that were planned for, None without a plan; more are taken all the same."""

    def make_ready(self, n: int) -> None:
        """Commit, and say once when a sequence goes over `skvq_max_ctx`."""
        super().make_ready(n)
        if self.max_ctx is not None and self.offset + n > self.max_ctx:
            _tell_of_growth(self.max_ctx)

    @staticmethod
    def _order(stream: Stream) -> mx.array | None:
        order = stream.body.live[3].get("order")
        return None if order is None else order[:, :, 0].astype(mx.int32)

    @property
    def key_perms(self) -> mx.array | None:
        """Order of key channels (B, H, D) int32; None before it is fitted."""
        return self._order(self.keys_stream)

    @property
    def value_perms(self) -> mx.array | None:
        """Order of value channels (B, H, D) int32; None before it is fitted."""
        return self._order(self.values_stream)

    @property
    def perm_bytes(self) -> int:
        """Bytes of both orders."""
        streams = (self.keys_stream, self.values_stream)
        orders = [s.body.live[3].get("order") for s in streams]
        return sum(order.nbytes for order in orders if order is not None)

    @property
    def quantized_tokens(self) -> int:
        """Tokens held in packed form."""
        return self.keys_stream.body.length

    @property
    def tokens_seen(self) -> int:
        """Tokens fed."""
        return self.offset


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> SKVQKVCache:
    """The cache of one layer."""
    return SKVQKVCache(config, shape, context)


FIT_FIELDS = (
    "skvq_bits_key", "skvq_bits_value", "skvq_group_size", "skvq_reorder", "skvq_clip_search",
    "skvq_clip_alpha",
)  # fmt: skip
"""Settings that fitted arrays depend on."""


def fit(config: KVCacheConfig, sample: LayerSample) -> dict[str, mx.array]:
    """Orders and clip factors of one layer, from what it saw of a text behind the sinks."""
    return fit_sides(skvq_plan(config), sample)
