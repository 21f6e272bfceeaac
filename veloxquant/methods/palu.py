"""palu: low-rank latents of keys and values, by groups of heads.

Neighbouring KV heads form a row, and the first 512 rows of a group give its strongest directions.
Later tokens are projected 32 at a time; each token's leading latents are coded at `palu_hi_bit`
and the others at `palu_lo_bit`, with scales for each `palu_group_size` latents. Attention reads
latents: queries are projected, and sums of latents are turned into sums of rows.
Source: Chang et al., Palu, 2024, arXiv 2407.21118. Differs: activations of the sequence itself are
factorised instead of projection weights; keys are coded rotated, in directions that suit all
positions (where the layer's rotation is known), so that they are never rebuilt; widths follow the
order of the latents, without the Hadamard transform that equal widths would need; a share of energy
is a rank that holds it for any rows, so bytes are known beforehand; heads that do not divide into
`palu_n_head_groups` make the next smaller number of equal groups.
"""

from typing import Any, cast

from veloxquant.cache.context import LayerContext
from veloxquant.cache.joined_heads import JoinedHeads
from veloxquant.cache.layouts.latent import palu_groups, palu_plan
from veloxquant.cache.rope import shiftable
from veloxquant.cache.turned_energy import TurnedEnergy
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.latent_rows import LatentCodec
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.latent import LatentSpec


class PALUKVCache(JoinedHeads):
    """Latents of groups of heads behind an exact incomplete block."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, rope: Any | None = None) -> None:
        plan, groups, codec = palu_plan(config), palu_groups(config, shape.n_kv_heads), None
        spec = cast(LatentSpec, plan.keys.spec)
        size = shape.n_kv_heads // groups
        if shiftable(rope):
            moments = TurnedEnergy(rope, plan.keys.n_sink, size).energy
            codec = cast(Codec, LatentCodec(size * shape.k_dim, spec, moments))
        super().__init__(plan, shape, groups, config.method, (codec, None))
        self.rank = spec.kept(size * shape.k_dim)
        """Latents of the keys of a group."""

    @property
    def projection_bytes(self) -> int:
        """Bytes of the bases of keys and values."""
        streams = (self.keys_stream, self.values_stream)
        return sum(a.nbytes for s in streams for a in s.body.fitted.values())


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> PALUKVCache:
    """The cache of one layer."""
    return PALUKVCache(config, shape, context.rope)
