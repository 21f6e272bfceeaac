"""svdq: latents of keys in the directions of their own covariance, most bits for the strongest.

The first 256 keys of a head give it a basis and a mean. Later keys wait for a block of
`svdq_group_size`, are projected, and each latent is coded along the tokens of the block at the
width that `svdq_bit_schedule` gives its group. Values stay as they are.
Source: Hong et al., SVDq, 2025, arXiv 2502.15304. Differs: the basis belongs to the first 256
tokens and not to the whole prompt, so the state does not depend on how a prompt was cut, and (where
the layer's rotation is known) it suits all positions; a share of energy is a rank that holds it for
any rows, so bytes are known beforehand; one bit is the mean less or plus the mean deviation; keys
are not dropped by sparsity.
"""

from typing import Any, cast

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.latent import svdq_plan
from veloxquant.cache.rope import shiftable
from veloxquant.cache.turned_moments import TurnedMoments
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.latent import ScheduledCodec
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.latent import ScheduledSpec, rank_for


class SVDqKVCache(ComposedCache):
    """Latents of keys behind an exact incomplete block; exact values."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, rope: Any | None = None) -> None:
        plan, codec = svdq_plan(config), None
        spec = cast(ScheduledSpec, plan.keys.spec)
        if shiftable(rope):
            moments = TurnedMoments(rope, plan.keys.n_sink)
            codec = cast(Codec, ScheduledCodec(shape.k_dim, spec, moments))
        super().__init__(plan, shape, config.method, (codec, None))
        self.rank = rank_for(spec.rank, spec.energy, shape.k_dim)
        """Directions of a head, those without bits included."""

    @property
    def value_fp16_bytes(self) -> int:
        """Bytes of the values, which are never packed."""
        return sum(store.nbytes for store in self.values_stream.all_stores())


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> SVDqKVCache:
    """The cache of one layer."""
    return SVDqKVCache(config, shape, context.rope)
