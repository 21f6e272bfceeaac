"""minicache: one direction for the vectors of two neighbouring layers, and a length for each.

From `minicache_start_frac` of the layers on, two layers make a pair. Blocks of 64 tokens are merged
once both layers have them: each head's directions meet on the arc between them, and tokens whose
cosine is below `minicache_retention_threshold` stay as they are, up to a fifth of a block, the
least alike first. The first four tokens and an incomplete block are exact.
Source: Liu et al., MiniCache, 2024, arXiv 2405.14366. Differs: the threshold is a cosine; the
number of tokens that stay is bounded for each block and head, so bytes are known beforehand; only
the second layer's row of such a token takes additional room.
"""

from functools import partial
from typing import Any

from veloxquant.cache.context import LayerContext
from veloxquant.cache.coordinators import LayerGroup
from veloxquant.cache.group_coordinators import MiniCacheCoordinator, by_role
from veloxquant.cache.grouped import GroupedCache
from veloxquant.cache.layouts.latent import minicache_groups, minicache_plan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.merged import EMPTY
from veloxquant.quantizers.sizes import LayerShape

layer_groups = minicache_groups
ROLES = ("primary", "merge")


def _layout(config: KVCacheConfig, index: int, size: int) -> tuple[Any, tuple[None, None]]:
    return minicache_plan(config, index, size), (None, None)


class MiniCacheKVCache(GroupedCache):
    """Directions and lengths, or lengths for the directions of the first layer of the pair."""

    def __init__(
        self, config: KVCacheConfig, shape: LayerShape, group: LayerGroup | None = None
    ) -> None:
        super().__init__(partial(_layout, config), shape, config.method, group)

    @classmethod
    def by_hand(
        cls,
        config: KVCacheConfig,
        role: str = "primary",
        group_id: int = 0,
        coordinator: MiniCacheCoordinator | None = None,
        n_readers: int = 1,
    ) -> tuple[KVCacheConfig, LayerContext]:
        """Settings and place of a layer made by hand.

        A "primary" says whether a layer reads its directions (`n_readers` 1 or 0), which is made
        after it with the role "merge". Without a coordinator it is by itself. Tokens beyond the
        coordinator's `max_ctx` stay exact, as those beyond `minicache_max_ctx`.

        Raises:
            QuantizerConfigError: for a role that cannot be, a reader without a primary, or more
                than one reader.
        """
        if n_readers not in (0, 1):
            raise QuantizerConfigError(
                f"n_readers={n_readers} is not possible; directions are merged in pairs: 1, or 0 "
                f"for a layer by itself"
            )
        if coordinator is not None:
            most = min(config.minicache_max_ctx, coordinator.max_ctx)
            config = config.with_fields(minicache_max_ctx=most)
        return config, by_role(config, ROLES, role, group_id, coordinator, n_readers)

    @property
    def role(self) -> str:
        """Which part it plays: "primary" holds directions, "merge" reads them there."""
        return ROLES[bool(self.index)]

    @property
    def n_merged(self) -> int:
        """Keys and values, of every head, that have a merged direction."""
        return self._coded() - self.n_retained

    @property
    def n_retained(self) -> int:
        """Keys and values, of every head, that stay as they are in merged blocks."""
        count = 0
        for side in self.group.members[-1].sides():
            slots = side.body.compact()[3].get("i")
            if slots is not None:
                count += int((slots != EMPTY).sum().item())
        return count

    @property
    def retention_rate(self) -> float:
        """Share of keys and values in merged blocks that stay as they are; 0.0 without any."""
        coded = self._coded()
        return self.n_retained / coded if coded else 0.0

    def _coded(self) -> int:
        if self._shape is None or not self.keys_stream.is_together:
            return 0
        batch, heads, _, _ = self._shape
        return batch * heads * sum(side.body.length for side in self.sides())


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> MiniCacheKVCache:
    """The cache of one layer."""
    return MiniCacheKVCache(config, shape, context.group)
