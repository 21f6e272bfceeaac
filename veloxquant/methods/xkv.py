"""xkv: latents of tokens that neighbouring layers share, a part of the basis for each layer.

In each group of `xkv_group_size` layers the rows of a token stand side by side, head by head. The
first 512 of them give a joint basis; later tokens are projected 32 at a time once all layers have
them. The first layer holds the latents at `xkv_latent_bits`, every layer its part of the basis.
Source: Chang et al., xKV, 2025, arXiv 2503.18893. Differs: every KV head has a basis of its own;
the basis belongs to the first 512 tokens and tokens of decoding are compressed too, so the state
does not depend on how a prompt was cut; keys are coded rotated, in directions that suit all
positions (where the layers' rotation is known); latents are quantized; a share of energy is a rank
that holds it for any rows, so bytes are known beforehand; tokens beyond `xkv_max_ctx` stay exact.
Layers that turn keys differently are not grouped.
"""

from functools import partial
from typing import Any, cast

from veloxquant.cache.context import LayerContext
from veloxquant.cache.coordinators import LayerGroup
from veloxquant.cache.group_coordinators import XKVCoordinator
from veloxquant.cache.grouped import GroupedCache
from veloxquant.cache.layouts.latent import xkv_groups, xkv_plan
from veloxquant.cache.plans import LayerPlan
from veloxquant.cache.rope import shiftable
from veloxquant.cache.turned_energy import TurnedEnergy
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.shared_latents import SharedLatentsCodec
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.shared import SharedLatentsSpec

layer_groups = xkv_groups


def _layout(
    config: KVCacheConfig, dim: int, rope: Any, index: int, size: int
) -> tuple[LayerPlan, tuple[Codec | None, None]]:
    plan, codec = xkv_plan(config, index, size), None
    if shiftable(rope):
        moments = TurnedEnergy(rope, plan.keys.n_sink, size).energy
        spec = cast(SharedLatentsSpec, plan.keys.spec)
        codec = cast(Codec, SharedLatentsCodec(dim, spec, moments))
    return plan, (codec, None)


class XKVCache(GroupedCache):
    """Joint latents and a part of their basis, or the part alone."""

    def __init__(
        self,
        config: KVCacheConfig,
        shape: LayerShape,
        group: LayerGroup | None = None,
        rope: Any | None = None,
    ) -> None:
        layout = partial(_layout, config, shape.k_dim, rope)
        super().__init__(layout, shape, config.method, group)

    @classmethod
    def by_hand(
        cls,
        config: KVCacheConfig,
        member_idx: int = 0,
        group_id: int = 0,
        n_members: int = 1,
        coordinator: XKVCoordinator | None = None,
        *,
        rope: Any | None = None,
    ) -> tuple[KVCacheConfig, LayerContext]:
        """Settings and place of a layer made by hand: number `member_idx` of `n_members`.

        Members are made in order. `rope` is the position encoding of the keys; without it they are
        coded as they come. Tokens beyond the coordinator's `max_ctx` stay exact, as those beyond
        `xkv_max_ctx`.

        Raises:
            QuantizerConfigError: for a place that is not in the group, or one of several members
                without a coordinator.
        """
        context = LayerContext(seed=config.seed, rope=rope)
        if not 0 <= member_idx < n_members:
            raise QuantizerConfigError(
                f"member_idx={member_idx} is not one of n_members={n_members}; members count from 0"
            )
        if coordinator is None:
            if n_members > 1:
                raise QuantizerConfigError(
                    f"n_members={n_members} layers share latents; give them the same coordinator"
                )
            return config, context
        config = config.with_fields(xkv_max_ctx=min(config.xkv_max_ctx, coordinator.max_ctx))
        if member_idx == 0:
            group = coordinator.begin(config, group_id, n_members)
        else:
            group = coordinator.joined(config, group_id, member_idx, n_members)
        return config, context._replace(group=group)

    @property
    def member_idx(self) -> int:
        """Place in the group."""
        return self.index

    @property
    def rank(self) -> int:
        """Latents of the keys of a token and head, for all layers of the group."""
        return cast(SharedLatentsSpec, self.plan.keys.spec).kept(self.layout_of[1].k_dim)

    @property
    def value_fp16_bytes(self) -> int:
        """Bytes of values that are exact rows: those not coded yet, or beyond `xkv_max_ctx`."""
        return self._side_bytes(self.values_stream, packed=False)

    @property
    def shared_basis_bytes(self) -> int:
        """Bytes of this layer's part of the bases."""
        return sum(a.nbytes for side in self.sides() for a in side.body.fitted.values())


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> XKVCache:
    """The cache of one layer."""
    return XKVCache(config, shape, context.group, context.rope)
