"""gear: kivi's groups, corrected by low-rank factors and a few exact entries.

Blocks of four groups of tokens: the outliers of each key and value are kept exactly, the rest is
coded at two to four bits, and factors of small rank take the coherent part of
the rounding error. Rounding errors are nearly white, so `gear_energy_threshold` would ask for
almost full rank; the rank stays at a 32nd of the head size unless `gear_rank` sets it.
Source: Kang et al., GEAR, 2024, arXiv 2403.05527. Differs: blocks lie at absolute positions instead
of one block a prompt, so the state does not depend on how a prompt was chunked; a few
factors have 8 bits, which makes up for what shorter blocks cost.
"""

import numpy as np

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.coded import gear_plan
from veloxquant.cache.stream import Stream
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.coded import CorrectedSpec


class GEARKVCache(ComposedCache):
    """Corrected blocks of keys and values behind an incomplete block of exact rows."""

    @property
    def base_only_key_bytes(self) -> int:
        """Bytes of packed keys without their corrections."""
        return self._base_bytes(self.keys_stream)

    @property
    def base_only_value_bytes(self) -> int:
        """Bytes of packed values without their corrections."""
        return self._base_bytes(self.values_stream)

    @property
    def value_fp16_bytes(self) -> int:
        """Bytes of values that are never packed."""
        packs = isinstance(self.values_stream.plan.spec, CorrectedSpec)
        return 0 if packs else sum(s.nbytes for s in self.values_stream.all_stores())

    @property
    def error_recovery_ratio(self) -> float:
        """Share of the backbone's squared rounding error that the factors take away."""
        sums = [
            np.array(store.live[3]["e"], dtype=np.float64).sum(axis=(0, 1, 2))
            for stream in (self.keys_stream, self.values_stream)
            for store in stream.coded_stores()
            if "e" in store.live[3]
        ]
        without, remaining = np.sum(sums, axis=0) if sums else (0.0, 0.0)
        return float(1 - remaining / without) if without > 0 else 0.0

    def _base_bytes(self, stream: Stream) -> int:
        spec = stream.plan.spec
        if self._shape is None or not isinstance(spec, CorrectedSpec):
            return 0
        batch, heads, _, _ = self._shape
        store = stream.body
        one = spec.base.nbytes(store.capacity, store.codec.dim, self._dtype.size)
        return batch * heads * one


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> GEARKVCache:
    """The cache of one layer."""
    return GEARKVCache(gear_plan(config), shape, config.method)
