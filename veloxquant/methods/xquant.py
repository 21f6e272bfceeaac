"""xquant: codes of one layer that its neighbours read with scales of their own.

Keys are coded per channel and values per token, in groups of `xquant_group_quant_size`. In each
group of layers the first one holds codes; the others hold scales fitted to those codes by least
squares, and residuals at `xquant_residual_bits` (0: none, as published). The newest group of tokens
stays exact.
Source: Yang et al., XQuant, 2025, arXiv 2510.11236. Differs: scales by least squares; residuals;
at one and two bits the grids of the other affine methods instead of shrunken ends, at the same
error; buffers grow past `xquant_max_ctx`. Layers that turn keys differently are not grouped.
"""

from functools import partial
from typing import Any

from veloxquant.cache.context import LayerContext
from veloxquant.cache.coordinators import LayerGroup
from veloxquant.cache.group_coordinators import XQuantCoordinator, by_role
from veloxquant.cache.grouped import GroupedCache
from veloxquant.cache.layouts.latent import xquant_groups, xquant_plan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape

layer_groups = xquant_groups
ROLES = ("anchor", "reuse")


def _layout(config: KVCacheConfig, index: int, size: int) -> tuple[Any, tuple[None, None]]:
    return xquant_plan(config, index, size), (None, None)


class XQuantKVCache(GroupedCache):
    """Codes, or scales for the codes of the first layer of the group."""

    def __init__(
        self, config: KVCacheConfig, shape: LayerShape, group: LayerGroup | None = None
    ) -> None:
        super().__init__(partial(_layout, config), shape, config.method, group)

    @classmethod
    def by_hand(
        cls,
        config: KVCacheConfig,
        role: str = "anchor",
        group_id: int = 0,
        coordinator: XQuantCoordinator | None = None,
        n_readers: int = 1,
    ) -> tuple[KVCacheConfig, LayerContext]:
        """Settings and place of a layer made by hand.

        An "anchor" says how many layers read its codes, 0 for none; they are made after it with
        the role "reuse". Without a coordinator it is by itself.

        Raises:
            QuantizerConfigError: for a role that cannot be, or a reader without an anchor.
        """
        return config, by_role(config, ROLES, role, group_id, coordinator, n_readers)

    @property
    def role(self) -> str:
        """Which part it plays: "anchor" holds codes, "reuse" reads them there."""
        return ROLES[bool(self.index)]

    @property
    def reuse_param_bytes(self) -> int:
        """Bytes of scales and offsets for codes of another layer."""
        if not self.index:
            return 0
        stores = [side.body for side in self.sides()]
        return sum(s.live[3][n].nbytes for s in stores if s.length for n in ("s", "b"))

    @property
    def effective_pair_bits(self) -> float:
        """Bits per element that the layers of the group hold on average; 0.0 while empty."""
        members = [m for m in self.group.members if isinstance(m, XQuantKVCache)]
        full = sum(m.full_bytes() for m in members)
        return 16 * sum(m.nbytes for m in members) / full if full else 0.0


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> XQuantKVCache:
    """The cache of one layer."""
    return XQuantKVCache(config, shape, context.group)
