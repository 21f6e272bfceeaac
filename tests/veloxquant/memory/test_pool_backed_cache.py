import copy
import gc
import types

import mlx.core as mx
import pytest

from veloxquant.core.exceptions import BlockPoolExhaustedError
from veloxquant.memory import (
    BlockPoolAllocator,
    PoolBackedKVCache,
    PoolConfig,
    build_pooled_caches,
)


def make_pool(n_blocks=1024, block_size=16, **settings):
    return BlockPoolAllocator(PoolConfig(block_size, n_blocks, **settings))


def kv(n, start=0, batch=1, heads=2, k_dim=8, v_dim=6, dtype=mx.float32):
    rows = mx.arange(start, start + n).reshape(1, 1, n, 1)
    return tuple(
        mx.broadcast_to(rows * sign, (batch, heads, n, dim)).astype(dtype)
        for sign, dim in ((1, k_dim), (-1, v_dim))
    )


def feed(cache, *chunks):
    out = None
    for n in chunks:
        out = cache.update_and_fetch(*kv(n, cache.offset))
    return out


def same(pair, other):
    return all(
        mx.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(pair, other, strict=True)
    )


def test_caches_agree_with_the_stock_cache_token_by_token():
    from mlx_lm.models.cache import KVCache

    ours, stock = PoolBackedKVCache(make_pool()), KVCache()
    for n in (3, 1, 252, 1, 300, 1):
        got = ours.update_and_fetch(*kv(n, ours.offset))
        want = stock.update_and_fetch(*kv(n, stock.offset))
        assert same(got, want)
        assert (ours.offset, ours.size(), ours.empty()) == (stock.offset, stock.size(), False)
    assert (ours.trim(40), stock.trim(40)) == (40, 40)
    assert same(ours.update_and_fetch(*kv(2)), stock.update_and_fetch(*kv(2)))
    assert same(ours.state, stock.keys_and_values())


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("batch", [1, 3])
def test_any_type_batch_and_unequal_head_sizes(dtype, batch):
    cache = PoolBackedKVCache(make_pool())
    for n in (5, 1):
        cache.update_and_fetch(*kv(n, cache.offset, batch=batch, dtype=dtype))
    assert same(cache.keys_and_values(), kv(6, batch=batch, dtype=dtype))
    assert cache.nbytes == batch * 2 * 256 * (8 + 6) * dtype.size


@pytest.mark.parametrize("step", [None, 1, 16, 100, 1000])
def test_charge_is_the_capacity_held_whatever_the_chunks(step):
    pool = make_pool()
    cache = PoolBackedKVCache(pool, step=step)
    for n in (100, 300, 300, 300, 1, 1):
        feed(cache, n)
        capacity = cache.keys.shape[2]
        assert capacity == -(-cache.offset // cache.step) * cache.step
        blocks = -(-capacity // 16)
        assert (512 - pool.n_free("k"), 512 - pool.n_free("v")) == (blocks, blocks)


def test_default_step_and_bad_step():
    assert PoolBackedKVCache(make_pool()).step == 256
    assert PoolBackedKVCache(make_pool(block_size=512)).step == 512
    with pytest.raises(ValueError, match="step=0"):
        PoolBackedKVCache(make_pool(), step=0)


@pytest.mark.parametrize("separate", [True, False])
def test_exhausted_pool_changes_nothing_over_both_streams(separate):
    pool = make_pool(48, separate_kv=separate)  # 300 tokens need 32 blocks for each of K and V
    cache = PoolBackedKVCache(pool)
    with pytest.raises(BlockPoolExhaustedError):
        feed(cache, 300)
    assert (cache.offset, cache.empty(), cache.nbytes) == (0, True, 0)
    assert pool.stats.blocks_in_use() == 0
    feed(cache, 200)
    before = cache.keys
    with pytest.raises(BlockPoolExhaustedError):
        feed(cache, 100)
    assert (cache.offset, cache.keys is before, pool.stats.blocks_in_use()) == (200, True, 32)
    assert same(feed(cache, 1), kv(201))


def test_shapes_that_do_not_fit_are_refused_before_any_charge():
    pool = make_pool()
    cache = PoolBackedKVCache(pool)
    keys, values = kv(3)
    for bad in (
        (keys, values[:, :, :2]),
        (keys[0], values[0]),
        (keys[:, :1], values),
    ):
        with pytest.raises(ValueError, match="do not belong together"):
            cache.update_and_fetch(*bad)
    assert pool.stats.n_allocations == 0
    feed(cache, 3)
    with pytest.raises(ValueError, match="new values"):
        cache.update_and_fetch(*kv(1, v_dim=7))
    with pytest.raises(ValueError, match="new keys"):
        cache.update_and_fetch(*kv(1, batch=2))
    assert cache.offset == 3


def test_empty_append_is_free():
    pool = make_pool()
    cache = PoolBackedKVCache(pool)
    keys, _ = feed(cache, 0)
    assert (keys.shape[2], cache.empty(), pool.stats.n_allocations) == (0, True, 0)
    feed(cache, 2)
    assert same(feed(cache, 0), kv(2))


# ---- release and owners ---------------------------------------------------------------------


def test_default_owners_are_unique_and_do_not_free_each_other():
    pool = make_pool()
    one, two = PoolBackedKVCache(pool), PoolBackedKVCache(pool)
    feed(one, 1)
    feed(two, 1)
    one.release()
    assert pool.stats.blocks_in_use() == 32
    assert same(two.state, kv(1))


def test_release_drops_the_buffers_and_later_use_charges_from_zero():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, owner=4)
    feed(cache, 700)
    cache.release()
    cache.release()
    assert (cache.nbytes, cache.offset, cache.empty(), pool.blocks_for(4)) == (0, 0, True, [])
    assert same(feed(cache, 3), kv(3))
    assert len(pool.blocks_for(4)) == 32


def test_released_memory_is_really_gone():
    pool = make_pool()
    cache = PoolBackedKVCache(pool)
    gc.collect()
    base = mx.get_active_memory()
    mx.eval(cache.update_and_fetch(mx.ones((1, 8, 600, 64)), mx.ones((1, 8, 600, 64))))
    assert mx.get_active_memory() - base >= cache.nbytes == 2 * 8 * 768 * 64 * 4
    cache.release()
    assert mx.get_active_memory() - base < 64 << 10


def test_blocks_freed_by_the_pool_are_charged_again_with_the_next_token():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, owner=4)
    feed(cache, 300)
    pool.free_all(4)
    assert same(feed(cache, 1), kv(301))
    assert len(pool.blocks_for(4)) == 64


# ---- trim -----------------------------------------------------------------------------------


def test_trim_rewinds_and_returns_whole_steps():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, owner=4)
    feed(cache, 700)
    assert cache.is_trimmable()
    assert cache.trim(10) == 10
    assert len(pool.blocks_for(4)) == 96
    assert cache.trim(400) == 400
    assert (cache.offset, cache.keys.shape[2], len(pool.blocks_for(4))) == (290, 512, 64)
    assert same(feed(cache, 5), kv(295))
    assert cache.trim(0) == cache.trim(-3) == 0
    assert cache.trim(1000) == 295
    assert (cache.empty(), cache.nbytes, pool.blocks_for(4)) == (True, 0, [])


def test_trim_gives_the_memory_back():
    cache = PoolBackedKVCache(make_pool())
    gc.collect()
    base = mx.get_active_memory()
    mx.eval(cache.update_and_fetch(mx.ones((1, 1, 1024, 256)), mx.ones((1, 1, 1024, 256))))
    cache.trim(1000)
    assert cache.nbytes == 2 * 256 * 256 * 4
    assert mx.get_active_memory() - base == pytest.approx(cache.nbytes, rel=0.05)


# ---- copies ---------------------------------------------------------------------------------


def test_copy_shares_one_charge_until_either_side_writes():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, owner=4)
    feed(cache, 300)
    twin = copy.deepcopy(cache)
    assert (twin.pool, twin.owner, twin.offset) == (pool, 4, 300)
    assert len(pool.blocks_for(4)) == 64
    keys = kv(1, 900)
    twin.update_and_fetch(*keys)
    assert len(pool.blocks_for(4)) == 128
    assert same(cache.state, kv(300))
    assert same(feed(cache, 1), kv(301))
    assert len(pool.blocks_for(4)) == 128
    assert mx.array_equal(twin.keys_and_values()[0][..., 300:, :], keys[0])


@pytest.mark.parametrize("first", ["original", "copy"])
def test_release_of_one_side_leaves_the_other_whole(first):
    pool = make_pool()
    cache = PoolBackedKVCache(pool, owner=4)
    feed(cache, 300)
    gone, kept = cache, copy.deepcopy(cache)
    if first == "copy":
        gone, kept = kept, gone
    gone.release()
    assert len(pool.blocks_for(4)) == 64
    assert same(feed(kept, 1), kv(301))
    assert len(pool.blocks_for(4)) == 64
    kept.release()
    assert pool.blocks_for(4) == []


def test_copy_that_is_dropped_unused_costs_nothing():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, owner=4)
    feed(cache, 10)
    copy.copy(cache)
    gc.collect()
    feed(cache, 1)
    assert len(pool.blocks_for(4)) == 32
    cache.release()
    assert pool.blocks_for(4) == []


def test_copy_that_the_pool_cannot_afford_fails_at_its_first_write_unchanged():
    pool = make_pool(48, separate_kv=False)
    cache = PoolBackedKVCache(pool)
    feed(cache, 200)
    twin = copy.deepcopy(cache)
    with pytest.raises(BlockPoolExhaustedError):
        feed(twin, 1)
    assert (twin.offset, pool.stats.blocks_in_use()) == (200, 32)
    assert same(twin.state, cache.state)


def test_trim_of_a_shared_copy_needs_nothing_from_the_pool():
    pool = make_pool(96, separate_kv=False)
    cache = PoolBackedKVCache(pool)
    feed(cache, 700)
    twin = copy.deepcopy(cache)
    assert twin.trim(690) == 690
    assert pool.n_free() == 0
    assert (same(twin.state, kv(10)), same(cache.state, kv(700))) == (True, True)


def test_trimmed_copy_takes_only_what_it_needs():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, owner=4)
    feed(cache, 700)
    twin = copy.deepcopy(cache)
    twin.trim(600)
    assert same(feed(twin, 1), kv(101))
    assert (len(pool.blocks_for(4)), twin.keys.shape[2]) == (96 + 32, 256)
    assert same(cache.state, kv(700))


def test_copy_is_lazy_and_then_holds_what_it_says():
    cache = PoolBackedKVCache(make_pool())
    mx.eval(cache.update_and_fetch(mx.ones((1, 8, 512, 64)), mx.ones((1, 8, 512, 64))))
    gc.collect()
    base = mx.get_active_memory()
    twin = copy.deepcopy(cache)
    assert mx.get_active_memory() - base < 64 << 10
    twin.trim(1)
    mx.eval(twin.update_and_fetch(mx.zeros((1, 8, 1, 64)), mx.zeros((1, 8, 1, 64))))
    assert mx.get_active_memory() - base == pytest.approx(twin.nbytes, rel=0.05)


# ---- state and masks ------------------------------------------------------------------------


def test_state_is_valid_when_empty_and_travels():
    pool = make_pool()
    cache = PoolBackedKVCache(pool, owner=4)
    assert cache.state == (None, None)
    assert cache.meta_state == ""
    cache.meta_state = ""
    with pytest.raises(ValueError, match="no meta state"):
        cache.meta_state = "x"
    mx.eval([cache.state])
    feed(cache, 40)
    other = PoolBackedKVCache(pool, owner=5)
    other.state = cache.state
    assert (other.offset, len(pool.blocks_for(5))) == (40, 2 * 3)
    assert same(feed(other, 2), kv(42))
    other.state = kv(7)
    assert len(pool.blocks_for(5)) == 2
    other.state = (None, None)
    assert (other.empty(), pool.blocks_for(5)) == (True, [])


def test_state_that_does_not_fit_the_pool_or_itself_changes_nothing():
    pool = make_pool(8, separate_kv=False)
    cache = PoolBackedKVCache(pool, step=16)
    feed(cache, 10)
    with pytest.raises(BlockPoolExhaustedError):
        cache.state = kv(100)
    with pytest.raises(ValueError, match="belong together"):
        cache.state = (kv(3)[0], kv(4)[1])
    assert same(cache.state, kv(10))
    assert pool.stats.blocks_in_use() == 2


def test_writing_after_a_trim_does_not_change_arrays_handed_out():
    cache = PoolBackedKVCache(make_pool())
    saved = feed(cache, 256)
    mine = kv(256)
    other = PoolBackedKVCache(make_pool())
    other.state = mine
    for c in (cache, other):
        c.trim(5)
        c.update_and_fetch(*kv(5, 900))
    assert same(saved, kv(256))
    assert same(mine, kv(256))


@pytest.mark.parametrize("offset", [0, 10])
@pytest.mark.parametrize("N", [1, 4])
@pytest.mark.parametrize("window", [None, 3, 11, 14, 99])
@pytest.mark.parametrize("array", [False, True])
def test_mask_shows_what_the_stock_mask_shows(offset, N, window, array):
    from mlx_lm.models.cache import KVCache

    cache, stock = PoolBackedKVCache(make_pool()), KVCache()
    feed(cache, offset)
    stock.offset = offset

    def visible(mask):
        if isinstance(mask, mx.array):
            return mask
        causal = mx.arange(offset, offset + N)[:, None] >= mx.arange(offset + N)[None]
        return causal if mask == "causal" else mx.ones_like(causal)

    got = cache.make_mask(N, return_array=array, window_size=window)
    want = stock.make_mask(N, return_array=array, window_size=window)
    assert mx.array_equal(visible(got), visible(want))
    if N > 1 and array:
        assert isinstance(got, mx.array)


def test_window_holds_for_a_single_token():
    cache = PoolBackedKVCache(make_pool())
    feed(cache, 10)
    assert cache.make_mask(1, window_size=4).tolist() == [[False] * 7 + [True] * 4]
    assert cache.make_mask(1) is None
    assert cache.make_mask(2) == "causal"


def test_nothing_an_mlx_lm_caller_asks_for_misleads_it():
    cache = PoolBackedKVCache(make_pool())
    assert not hasattr(cache, "bits")
    assert not hasattr(cache, "to_quantized")
    assert bool(cache)


# ---- build_pooled_caches --------------------------------------------------------------------


def test_only_plain_attention_entries_are_pooled():
    from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

    class Hybrid:
        def make_cache(self):
            return [
                KVCache(),
                ArraysCache(2),
                RotatingKVCache(max_size=8),
                CacheList(ArraysCache(1), KVCache()),
            ]

    pool = make_pool()
    plain, arrays, rotating, both = build_pooled_caches(Hybrid(), pool, owner=4, step=16)
    assert type(plain) is type(both[1]) is PoolBackedKVCache
    assert (type(arrays), type(rotating), type(both[0])) == (
        ArraysCache,
        RotatingKVCache,
        ArraysCache,
    )
    assert plain.step == 16
    feed(plain, 1)
    feed(both[1], 1)
    assert len(pool.blocks_for(4)) == 4
    plain.release()
    assert pool.blocks_for(4) == []
    assert both[1].empty()


def test_model_without_make_cache_gets_one_entry_per_layer_with_one_owner():
    pool = make_pool()
    caches = build_pooled_caches(types.SimpleNamespace(layers=[None] * 3), pool, owner=-1)
    assert [type(c) for c in caches] == [PoolBackedKVCache] * 3
    assert len({c.owner for c in caches}) == 1
    assert caches[0].owner != -1


def test_copied_list_is_released_apart_from_the_original():
    pool = make_pool()
    caches = build_pooled_caches(types.SimpleNamespace(layers=[None] * 2), pool, owner=4)
    for cache in caches:
        feed(cache, 5)
    twins = copy.deepcopy(caches)
    for twin in twins:
        feed(twin, 1)
    assert len(pool.blocks_for(4)) == 2 * 64
    twins[1].release()
    assert all(twin.empty() for twin in twins)
    assert len(pool.blocks_for(4)) == 64
    assert all(same(cache.state, kv(5)) for cache in caches)
    caches[1].release()
    assert pool.blocks_for(4) == []


def test_model_generates_the_same_tokens_as_with_its_own_caches():
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(3)
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=64,
        )
    )
    prompt = mx.arange(20) % 64
    pool = make_pool()
    ours = build_pooled_caches(model, pool, owner=9)

    def tokens(cache):
        return [
            int(token)
            for token, _ in generate_step(prompt, model, prompt_cache=cache, max_tokens=8)
        ]

    assert tokens(ours) == tokens(make_prompt_cache(model))
    assert len(pool.blocks_for(9)) == 2 * 2 * 16
    ours[0].release()
    assert pool.n_free("k") == 512
