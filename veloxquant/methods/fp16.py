"""fp16: keys and values as the model made them, drawn from a block pool; the baseline.

Whatever the model's type is, 16 or 32 bits, rows keep it. Alone and in a batch the result equals
mlx-lm's own cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn, cast

import mlx.core as mx

from veloxquant.cache.batch import RowBatch
from veloxquant.cache.context import LayerContext
from veloxquant.cache.fitting import Version, refuse_state
from veloxquant.config.kv_cache import BASELINE, KVCacheConfig
from veloxquant.core.exceptions import CacheStateError
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

    @property
    def state(self) -> Any:
        """Keys and values of all tokens, or None and None, and the version.

        The version keeps mlx-lm's `save_prompt_cache` from writing a file that its loader, which
        knows its own classes only, could not read. Setting takes a pair, too.

        Raises:
            CacheStateError: when a state is of another version.
        """
        return (*self.keys_and_values(), Version())

    @state.setter
    def state(self, pair: Any) -> None:
        if isinstance(pair, tuple | list) and len(pair) > 2:
            *pair, version = pair
            if version != Version():
                raise CacheStateError(f"state of format {version!r}; this is none of fp16")
        cast("Any", PoolBackedKVCache.state).fset(self, pair)

    @classmethod
    def from_state(cls, state: Any, meta_state: Any = None) -> NoReturn:
        """Refused: a state is given to a cache that was built for its layer.

        Raises:
            CacheStateError: always, with what to do instead.
        """
        del state, meta_state
        refuse_state(cls)

    def compact_state(self) -> tuple[Any, Any]:
        """What goes into a file: keys and values of the tokens held."""
        return self.keys_and_values()

    @staticmethod
    def merge(caches: Sequence[Any]) -> RowBatch:
        """A batch of these sequences."""
        return RowBatch(caches)


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> Fp16KVCache:
    """The cache of one layer."""
    return Fp16KVCache(context.pool)
