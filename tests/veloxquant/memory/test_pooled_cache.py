import numpy as np
import pytest

from veloxquant.core.abstractions import KVCache
from veloxquant.core.exceptions import BlockPoolExhaustedError
from veloxquant.memory import BlockPoolAllocator, PoolConfig, PooledKVCache

D = 3


class ListCache(KVCache):
    """Keeps what it is fed; refuses vectors of another length; may keep only a window."""

    def __init__(self, window=None):
        self.k, self.v, self.window = [], [], window

    def append_key(self, k):
        self.k += self._rows(k)

    def append_value(self, v):
        self.v += self._rows(v)
        if self.window:
            del self.k[: -self.window], self.v[: -self.window]

    @staticmethod
    def _rows(x):
        if x.shape[-1] != D:
            raise ValueError("wrong length")
        return list(np.atleast_2d(x))

    def attend(self, q):
        return q * len(self.v)

    def memory_bytes(self):
        return sum(x.nbytes for x in self.k + self.v)

    def reset(self):
        self.k, self.v = [], []

    def __len__(self):
        return len(self.k)


def make(n_blocks=8, inner=None, **owner):
    pool = BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=n_blocks))
    return pool, PooledKVCache(inner or ListCache(), pool, **owner)


def feed(cache, n):
    for _ in range(n):
        cache.append(np.ones(D), np.ones(D))


def test_blocks_follow_tokens_in_lock_step():
    pool, cache = make(owner=5, format="int2")
    for tokens in range(1, 10):
        feed(cache, 1)
        assert cache.n_blocks_held() == 2 * -(-tokens // 4)
        assert sum(block.n_used for block in pool.blocks_for(5)) == 2 * tokens
    assert {(b.stream, b.format) for b in pool.blocks_for(5)} == {("k", "int2"), ("v", "int2")}
    assert len(cache) == 9
    assert cache.memory_bytes() == 9 * 2 * D * 8
    assert cache.attend(np.ones(1)) == 9


def test_no_block_is_taken_per_token():
    pool, cache = make()
    feed(cache, 8)
    assert pool.stats.n_allocations == 4


def test_keys_and_values_are_charged_apart_and_rows_together():
    _, cache = make()
    cache.append_key(np.ones((6, D)))
    assert cache.n_blocks_held() == 2
    cache.append_value(np.ones((1, D)))
    assert cache.n_blocks_held() == 3


@pytest.mark.parametrize("lacking", ["append_key", "append_value", "attend", "memory_bytes"])
def test_inner_without_the_interface_is_refused_without_charge(lacking):
    class Half:
        append_key = append_value = attend = memory_bytes = reset = lambda self, *_: None

    setattr(Half, lacking, None)
    pool = BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=4))
    with pytest.raises(TypeError, match=lacking):
        PooledKVCache(Half(), pool)
    assert pool.stats.n_allocations == 0


def test_cache_of_the_mlx_lm_kind_is_refused_with_a_way_out():
    from veloxquant.memory import PoolBackedKVCache

    pool = BlockPoolAllocator()
    with pytest.raises(TypeError, match="build_pooled_caches"):
        PooledKVCache(PoolBackedKVCache(pool), pool)


def test_append_refused_by_the_pool_reaches_nobody():
    pool, cache = make(n_blocks=3)  # two blocks of keys, one of values
    feed(cache, 4)
    with pytest.raises(BlockPoolExhaustedError):
        feed(cache, 1)
    assert (len(cache._inner.k), len(cache._inner.v)) == (4, 4)
    assert (cache.n_blocks_held(), pool.n_free("k")) == (2, 1)


@pytest.mark.parametrize("bad", ["key", "value"])
def test_append_refused_by_the_inner_cache_charges_nothing(bad):
    pool, cache = make()
    feed(cache, 4)
    before = pool.stats.blocks_in_use()
    call = cache.append_key if bad == "key" else cache.append_value
    with pytest.raises(ValueError, match="wrong length"):
        call(np.ones(D + 1))
    assert pool.stats.blocks_in_use() == before
    with pytest.raises(ValueError, match="wrong length"):
        cache.append(*(np.ones(D + (bad == name)) for name in ("key", "value")))
    held = len(cache._inner.k), len(cache._inner.v)
    assert held == ((4, 4) if bad == "key" else (5, 4))
    assert pool.stats.blocks_in_use() == sum(-(-n // 4) for n in held)


def test_release_frees_own_blocks_only_even_with_default_owners():
    pool, one = make()
    two = PooledKVCache(ListCache(), pool)
    feed(one, 5)
    feed(two, 5)
    one.release()
    one.release()
    assert (one.n_blocks_held(), two.n_blocks_held()) == (0, 4)
    assert pool.stats.blocks_in_use() == 4


def test_use_after_release_charges_for_every_token_still_held():
    _, cache = make()
    feed(cache, 5)
    cache.release()
    feed(cache, 4)
    assert cache.n_blocks_held() == 2 * 3


def test_reset_empties_and_the_next_request_starts_from_nothing():
    pool, cache = make()
    feed(cache, 9)
    cache.reset()
    assert (cache.n_blocks_held(), len(cache), len(cache._inner)) == (0, 0, 0)
    feed(cache, 1)
    assert pool.stats.blocks_in_use() == 2


def test_blocks_of_tokens_that_a_window_dropped_go_back():
    _, cache = make(inner=ListCache(window=6))
    feed(cache, 40)
    assert len(cache) == 6
    assert cache.n_blocks_held() == 4


def test_tokens_held_before_wrapping_are_charged_by_the_first_append():
    inner = ListCache()
    feed(inner, 6)
    _, cache = make(inner=inner)
    feed(cache, 1)
    assert cache.n_blocks_held() == 4
