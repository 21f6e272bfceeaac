"""Full-precision cache for mlx-lm models whose capacity is charged to a shared pool."""

from typing import Any, NamedTuple
from weakref import WeakSet

import mlx.core as mx

from veloxquant.memory.block_pool import BlockPoolAllocator
from veloxquant.memory.lease import Lease

GROWTH_STEP = 256
"""Tokens by which buffers grow unless a step is given."""
NO_OWNER_GIVEN = -1


class _Charge(NamedTuple):
    """What the pool is charged for one pair of buffers, and the caches that share the pair."""

    lease: Lease
    holders: "WeakSet[PoolBackedKVCache]"


class PoolBackedKVCache:
    """Stand in for mlx-lm's `KVCache`; the pool is charged for exactly the capacity held.

    Keys and values live in contiguous buffers whose capacity is a multiple of `step` tokens. Each
    of the two streams is charged for the capacity, rounded up to whole blocks; `n_used` of a block
    counts slots of the buffer, not tokens written. When the pool lacks blocks for either stream,
    the call raises and nothing has changed.

    `release` drops the buffers and returns their blocks; using the cache again starts it from
    empty and charges again. A trim that makes a whole step superfluous shrinks the buffers and
    returns blocks. If somebody frees the blocks by `pool.free_all(owner)`, the next update charges
    for everything held.

    `copy.deepcopy` keeps pool and owner. The copy shares the buffers, and their one charge, until
    either side writes: the writer then holds buffers of its own and is charged for them first.
    Releasing a copy never touches the original. A cache that is dropped without `release` leaves
    its blocks checked out.

    Args:
        pool: pool to charge.
        owner: request the blocks are checked out to; -1 draws a fresh id from the pool.
        step: tokens by which buffers grow; by default the larger of the block size and 256.

    Raises:
        ValueError: when `step` is not positive.
    """

    def __init__(
        self, pool: BlockPoolAllocator, owner: int = NO_OWNER_GIVEN, step: int | None = None
    ) -> None:
        if step is not None and step < 1:
            raise ValueError(f"step={step}: buffers grow by at least 1 token")
        self.pool = pool
        self.owner = pool.new_owner() if owner == NO_OWNER_GIVEN else owner
        self.step = max(pool.config.block_size, GROWTH_STEP) if step is None else step
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0
        self._charge = self._new_charge()
        self._group: WeakSet[PoolBackedKVCache] = WeakSet([self])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys (B, n_kv_heads, S, k_dim) and values (B, n_kv_heads, S, v_dim).

        Returns:
            Keys and values of all tokens: (B, n_kv_heads, offset, k_dim) and (..., v_dim).

        Raises:
            BlockPoolExhaustedError: when the pool lacks blocks; the cache is as before.
            ValueError: when the shapes do not fit each other or the tokens held.
        """
        self._require_fit(keys, values)
        S = keys.shape[2]
        if S == 0:
            return (keys, values) if self.keys is None else self.keys_and_values()
        start, stop = self.offset, self.offset + S
        capacity = self._capacity()
        if stop > capacity or self._is_shared() or not self._charge.lease.covers(capacity):
            capacity = _round_up(stop, self.step)
            self._recharge(capacity)
            self.keys = _with_room(self.keys, keys, start, capacity)
            self.values = _with_room(self.values, values, start, capacity)
        assert self.keys is not None, (capacity, start, stop)
        assert self.values is not None, (capacity, start, stop)
        self.keys[..., start:stop, :] = keys
        self.values[..., start:stop, :] = values
        self.offset = stop
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Keys and values of all tokens, without appending; (None, None) when empty."""
        if self.keys is None or self.values is None:
            return None, None
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    def release(self) -> None:
        """Drop the buffers and return their blocks to the pool; calling again does nothing.

        Caches made together by `build_pooled_caches` are released together.
        """
        for cache in list(self._group):
            cache._drop()

    def size(self) -> int:
        """Tokens stored."""
        return self.offset

    @property
    def state(self) -> tuple[Any, Any]:
        """Keys and values trimmed to `offset`; (None, None) when empty.

        Setting it replaces the content and charges for it.

        Raises:
            BlockPoolExhaustedError: when the pool lacks blocks; the cache is as before.
            ValueError: when the value is not a pair of (B, n_kv_heads, T, D) arrays.
        """
        return self.keys_and_values()

    @state.setter
    def state(self, pair: Any) -> None:
        keys, values = pair if pair else (None, None)
        if keys is None or values is None or keys.size == 0:
            self._drop()
            return
        _require_pair(keys, values)
        self._recharge(keys.shape[2])
        # slices are new handles: a later write must not show through in the caller's arrays
        self.keys, self.values = keys[...], values[...]
        self.offset = keys.shape[2]

    @property
    def meta_state(self) -> str:
        """Nothing beside the arrays: always empty."""
        return ""

    @meta_state.setter
    def meta_state(self, value: Any) -> None:
        if value:
            raise ValueError(f"this cache has no meta state, but {value!r} was set")

    def is_trimmable(self) -> bool:
        """Always True."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, or all if there are fewer.

        Returns:
            Tokens forgotten.
        """
        n = max(0, min(n, self.offset))
        self.offset -= n
        target = _round_up(self.offset, self.step)
        if n and self._capacity() - target >= self.step and not self._is_shared():
            if target == 0:
                self._drop()
            elif self.keys is not None and self.values is not None:
                # without the copy the slice would keep the long buffer alive
                self.keys = mx.contiguous(self.keys[..., :target, :])
                self.values = mx.contiguous(self.values[..., :target, :])
                mx.eval(self.keys, self.values)
                self._recharge(target)
        return n

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Attention mask for `N` new tokens behind `offset` old ones.

        Args:
            N: new tokens.
            return_array: give an array where the word "causal" would do.
            window_size: most recent tokens a query may see, itself included; None is all. It
                holds for a single new token, too.

        Returns:
            None (everything visible), "causal", or a boolean array (N, offset + N).
        """
        total = self.offset + N
        if window_size is not None and window_size >= total:
            window_size = None  # it hides nothing
        if window_size is None and N == 1:
            return None
        if window_size is None and not return_array:
            return "causal"
        columns = mx.arange(total)[None]
        rows = mx.arange(self.offset, total)[:, None]
        mask = rows >= columns
        return mask if window_size is None else mask & (rows < columns + window_size)

    def empty(self) -> bool:
        """Whether nothing is stored."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers, capacity included."""
        if self.keys is None or self.values is None:
            return 0
        return self.keys.nbytes + self.values.nbytes

    def __copy__(self) -> "PoolBackedKVCache":
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> "PoolBackedKVCache":
        twin = type(self)(self.pool, self.owner, self.step)
        memo[id(self)] = twin
        # caches copied in one deepcopy stay together, apart from the originals
        group = memo.setdefault(id(self._group), WeakSet())
        group.add(twin)
        twin._group = group
        twin.offset = self.offset
        if self.keys is not None and self.values is not None:
            twin.keys, twin.values = self.keys[...], self.values[...]
            twin._charge = self._charge
            self._charge.holders.add(twin)
        return twin

    def _capacity(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def _new_charge(self) -> _Charge:
        return _Charge(Lease(self.pool, self.owner, ("k", "v")), WeakSet([self]))

    def _is_shared(self) -> bool:
        return len(self._charge.holders) > 1

    def _recharge(self, capacity: int) -> None:
        """Be charged for own buffers of `capacity` tokens; nothing has changed if it raises."""
        if self._is_shared():
            charge = self._new_charge()
            charge.lease.charge(capacity)
            self._leave_charge()
            self._charge = charge
        else:
            self._charge.lease.charge(capacity)
            self._charge.lease.shrink(capacity)

    def _leave_charge(self) -> None:
        self._charge.holders.discard(self)
        if not self._charge.holders:
            self._charge.lease.release()

    def _drop(self) -> None:
        self.keys = self.values = None
        self.offset = 0
        self._leave_charge()
        self._charge = self._new_charge()

    def _require_fit(self, keys: mx.array, values: mx.array) -> None:
        _require_pair(keys, values)
        for name, held, new in (("keys", self.keys, keys), ("values", self.values, values)):
            if held is None:
                continue
            (B, H, _, D), (b, h, _, d) = held.shape, new.shape
            if (b, h, d) != (B, H, D):
                raise ValueError(
                    f"new {name} of shape {new.shape} do not fit the ones held, {held.shape}: "
                    "only the third size may differ"
                )


def build_pooled_caches(
    model: Any, pool: BlockPoolAllocator, owner: int, step: int | None = None
) -> list[Any]:
    """Make the caches of `model` and charge its plain attention layers to `pool`.

    Args:
        model: loaded mlx-lm model.
        pool: pool every layer's cache draws from.
        owner: id shared by all layers; -1 draws one fresh id from the pool.
        step: tokens by which buffers grow; by default the larger of the block size and 256.

    Returns:
        One entry per cache the model asks for: a `PoolBackedKVCache` where it would use a plain
        `KVCache` (inside a `CacheList`, too), the model's own cache everywhere else. Releasing
        one pooled cache releases all of them.
    """
    # importing mlx_lm takes about 2 s; whoever has a model has paid for it
    from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

    if owner == NO_OWNER_GIVEN:
        owner = pool.new_owner()
    group: WeakSet[PoolBackedKVCache] = WeakSet()

    def pooled(entry: Any) -> Any:
        if type(entry) is KVCache:
            cache = PoolBackedKVCache(pool, owner, step)
            cache._group = group
            group.add(cache)
            return cache
        if type(entry) is CacheList:
            return CacheList(*(pooled(part) for part in entry.caches))
        return entry

    return [pooled(entry) for entry in make_prompt_cache(model)]


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _with_room(held: mx.array | None, new: mx.array, used: int, capacity: int) -> mx.array:
    """Buffer (B, H, capacity, D) that starts with the `used` rows of `held`."""
    if held is not None and held.shape[2] == capacity:
        return held
    B, H, _, D = new.shape
    if held is None:
        return mx.zeros((B, H, capacity, D), new.dtype)
    room = mx.zeros((B, H, capacity - used, D), held.dtype)
    return mx.concatenate([held[..., :used, :], room], axis=2)


def _require_pair(keys: mx.array, values: mx.array) -> None:
    k_shape, v_shape = keys.shape, values.shape
    if not len(k_shape) == len(v_shape) == 4 or k_shape[:3] != v_shape[:3]:
        raise ValueError(
            f"keys {k_shape} and values {v_shape} do not belong together; "
            "give (B, n_kv_heads, S, head_dim) arrays that differ in the last size only"
        )
