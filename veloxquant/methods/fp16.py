"""fp16: keys and values as the model made them, drawn from a block pool; the baseline.

Whatever the model's type is, 16 or 32 bits, rows keep it. Alone and in a batch the result equals
mlx-lm's own cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import mlx.core as mx

from veloxquant.cache.batch import RowBatch
from veloxquant.cache.context import LayerContext
from veloxquant.config.kv_cache import BASELINE, KVCacheConfig
from veloxquant.memory.block import PoolConfig
from veloxquant.memory.block_pool import BlockPoolAllocator
from veloxquant.memory.pool_backed_cache import PoolBackedKVCache
from veloxquant.quantizers.sizes import BODY_STEP, LayerShape


class Fp16KVCache(PoolBackedKVCache):
    """The pool-backed cache with what serving needs: batches and the truth about its arrays."""

    method = BASELINE
    fidelity: Literal["exact", "proxy"] = "exact"
    use_kernels: bool | None = None

    def __init__(
        self, pool: BlockPoolAllocator | None = None, owner: int = -1, step: int = BODY_STEP
    ) -> None:
        # Without a pool of the caller's, a private one grows with the cache.
        private = PoolConfig(block_size=BODY_STEP, n_blocks=2, grow_on_exhaustion=True)
        super().__init__(pool or BlockPoolAllocator(private), owner, step)
        self.returns: Literal["arrays", "views"] = "arrays"
        self.mask_axes = 4

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp16KVCache:
        """An independent copy; buffers are shared until one of both writes."""
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, Fp16KVCache)
        twin.returns, twin.mask_axes = self.returns, self.mask_axes
        return twin

    @property
    def batch_views(self) -> bool:
        """Whether a batch of such rows may hand out views."""
        return self.returns == "views"

    def commit(self) -> None:
        """Rows are written when they arrive."""

    def make_ready(self, n: int) -> None:
        """New tokens displace nothing."""

    @property
    def rows(self) -> int:
        """Tokens held."""
        return self.offset

    def shape(self) -> LayerShape | None:
        """Attention shape without query heads, once known."""
        if self.keys is None or self.values is None:
            return None
        heads, k_dim, v_dim = self.keys.shape[1], self.keys.shape[3], self.values.shape[3]
        return LayerShape(heads, heads, k_dim, v_dim, self.keys.dtype.size)

    def arrays(self) -> Iterator[mx.array]:
        """The two buffers."""
        for a in (self.keys, self.values):
            if a is not None:
                yield a

    def compact_state(self) -> Any:
        """What goes into a file: the state, which is cut to the tokens held already."""
        return self.state

    @staticmethod
    def merge(caches: Sequence[Any]) -> RowBatch:
        """A batch of these sequences."""
        return RowBatch(caches)


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> Fp16KVCache:
    """The cache of one layer."""
    return Fp16KVCache(context.pool)
