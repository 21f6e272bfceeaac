"""cachegen: integer codes in chunks that entropy coding can shrink further on the way to a file.

By channel (the default), 256 tokens share a step, so differences between neighbouring tokens are
small integers; by token, every token is coded when it comes. First layers get a bit more, last ones
a bit less. What is held is the fixed-width form: entropy-coded data can be neither sliced by token
nor planned, so `cachegen_use_delta` and `cachegen_group_size` shape only what is saved or sent
(`coded_chunks`) and the savings that are reported. Chunks end at multiples of 256 tokens; an
incomplete one waits exact, on average 128 tokens, which makes short sequences larger than their
codes.
Source: Liu et al., CacheGen, 2023, arXiv 2310.07240. Differs: a codec for transport there, the
cache itself here; frequencies are counted for each chunk instead of once for a model, so there is
nothing to calibrate; four sink tokens stay exact, whose extremes would widen the step of the first
chunk, which holds the other 252.
"""

from collections.abc import Iterator

import numpy as np

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.coded import CACHEGEN_CHUNK, cachegen_bits, cachegen_plan
from veloxquant.cache.opened import OpenedStream
from veloxquant.cache.store import Store
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.delta import coded_bytes, pack_chunk
from veloxquant.quantizers.sizes import LayerShape


class CacheGenKVCache(ComposedCache):
    """Fixed-width codes with a scale for each channel and chunk, or for each token."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> None:
        place = context.layer, context.n_layers
        super().__init__(cachegen_plan(config, *place), shape, config.method)
        self.assigned_bits = cachegen_bits(config, *place)
        """Bits of a code in this layer."""
        self.group_size = config.cachegen_group_size
        self.use_delta = config.cachegen_use_delta

    @property
    def fixed_width_key_bytes(self) -> int:
        """Bytes of packed keys: the form that is held."""
        return self.compressed_key_bytes

    @property
    def fixed_width_value_bytes(self) -> int:
        """Bytes of packed values: the form that is held."""
        return self.compressed_value_bytes

    @property
    def entropy_savings(self) -> float:
        """Share of the codes' bits that entropy coding would save in a file; 0.0 without codes."""
        fixed = coded = 0
        for codes in self._chunks():
            plain = self.assigned_bits * codes.size // 8
            fixed += plain
            coded += min(plain, coded_bytes(codes, *self._form, use_delta=self.use_delta))
        return 1 - coded / fixed if fixed else 0.0

    @property
    def _form(self) -> tuple[int, int]:
        return self.assigned_bits, self.group_size

    def coded_chunks(self) -> Iterator[bytes]:
        """Every whole chunk of codes as bytes for `delta.unpack_chunk`, keys then values.

        A first chunk behind sinks is short by them.
        """
        for codes in self._chunks():
            yield pack_chunk(codes, *self._form, use_delta=self.use_delta)

    def _chunks(self) -> Iterator[np.ndarray]:
        """Codes (tokens, B·H·D) of each whole chunk."""
        for stream in (self.keys_stream, self.values_stream):
            *opening, body = stream.coded_stores()
            yield from (self._codes(store) for store in opening if store.length)
            codes = self._codes(body)
            for start in range(0, len(codes) - CACHEGEN_CHUNK + 1, CACHEGEN_CHUNK):
                yield codes[start : start + CACHEGEN_CHUNK]

    @staticmethod
    def _codes(store: Store) -> np.ndarray:
        """Codes (tokens, B·H·D) int32 of a store, empty while there are none."""
        if not store.length:
            return np.zeros((0, 1), dtype=np.int32)
        codes = np.asarray(store.codec.codes(store.live[3]))  # type: ignore[attr-defined]
        if not store.codec.spec.token_local:
            codes = codes.swapaxes(-1, -2)
        codes = codes[:, :, : store.length].transpose(2, 0, 1, 3)
        return codes.reshape(store.length, -1).astype(np.int32)


class ChunkedCacheGenKVCache(CacheGenKVCache):
    """The same by channel: chunks, the first one short by the sinks."""

    stream_type = OpenedStream


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> CacheGenKVCache:
    """The cache of one layer."""
    chunked = config.cachegen_per_channel
    return (ChunkedCacheGenKVCache if chunked else CacheGenKVCache)(config, shape, context)
