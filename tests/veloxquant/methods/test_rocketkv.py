"""rocketkv: how a ratio is split, what bounds promise, what a single query reads."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import (
    Tokens,
    attend,
    feed,
    held_rows,
    new_cache,
    random_tokens,
    same,
    shape_of,
    worst,
)

from veloxquant.cache.scorers import WindowAttention
from veloxquant.cache.selection import select_rows
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import RocketKVOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.rocketkv import build_paged_summary_batched
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.pages import PageSplit


def config(form: str = "exact", **fields) -> KVCacheConfig:
    given = {f"rocketkv_{name}": value for name, value in fields.items()}
    options = RocketKVOptions(**{"rocketkv_obs_window": 8, **given})
    return KVCacheConfig(method="rocketkv", options=options).with_fields(eviction_storage=form)


def compressed(tokens: Tokens, size: int | None = None, **fields):
    """A cache that has read a prompt and its last token."""
    cache = new_cache(config(**fields), shape_of(tokens))
    feed(cache, tokens.cut(0, tokens.length - 1), size)
    attend(cache, tokens.cut(tokens.length - 1, tokens.length))
    cache.commit()
    return cache


# ---- the split ------------------------------------------------------------------------------


def test_sizes_at_the_defaults_are_those_of_the_paper() -> None:
    split = PageSplit(8.0, 0, 32)
    assert split.stages == pytest.approx((2.204, 3.63), abs=1e-3)
    assert (split.rows(4096), split.page, split.head_channels(128), split.read(4096)) == (
        1858, 2, 70, 256,
    )  # fmt: skip


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 4.0, 16.0, 64.0, 2.0**20])
def test_both_stages_make_up_the_ratio(ratio: float) -> None:
    split = PageSplit(ratio, 0, 1)
    first, second = split.stages
    assert first * second == pytest.approx(ratio)
    assert 1 <= split.page <= max(1, second)
    assert split.head_channels(128) in range(1, 129)


def test_a_ratio_of_one_leaves_nothing_out() -> None:
    split = PageSplit(1.0, 4, 32)
    assert (split.rows(999), split.page, split.head_channels(64), split.read(999)) == (
        999, 1, 64, 999,
    )  # fmt: skip
    tokens, more = random_tokens(100, seed=1), random_tokens(5, seed=2)
    cache = compressed(tokens, compression_ratio=1.0)
    plain = new_cache(KVCacheConfig(method="fp16"), shape_of(tokens))
    feed(plain, tokens)
    assert same(feed(cache, more, 1), feed(plain, more, 1))
    assert cache.compression_ratio == pytest.approx(2 / tokens.keys.dtype.size)


# ---- eviction -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 23])
def test_rows_that_stay_are_those_of_a_wide_snapkv(size: int | None) -> None:
    tokens = random_tokens(300, seed=3)
    cache = compressed(tokens, size)
    rows = int(300 / cache.stage1_ratio)
    uncut = new_cache(config(compression_ratio=1.0), shape_of(tokens))
    feed(uncut, tokens)
    scorer = WindowAttention(8, 63, pool="max", group="sum")
    scorer.observe(uncut, tokens.queries[:, :, -8:], 64**-0.5)
    assert same(cache.kept_positions(), select_rows(scorer.score(uncut), rows, 4, 8))
    assert cache.size() == cache.tokens_kept == rows
    assert cache.keep_rate == rows / 300


def test_a_short_prompt_stays_whole() -> None:
    tokens = random_tokens(13, seed=4)
    cache = compressed(tokens)
    assert cache.size() == 13
    assert not cache.page_max.length
    plain = new_cache(KVCacheConfig(method="fp16"), shape_of(tokens))
    feed(plain, tokens)
    more = random_tokens(3, seed=5)
    assert same(feed(cache, more, 1), feed(plain, more, 1))


def test_bytes_are_those_of_rows_and_bounds() -> None:
    tokens = random_tokens(1024, seed=6, heads=1, repeat=1, k_dim=128, dtype=mx.bfloat16)
    cache = compressed(tokens, obs_window=32)
    rows, pages = 464, 232
    assert cache.stage1_bytes == 2 * 2 * 128 * rows
    assert cache.stage2_aux_bytes == 2 * 2 * 128 * pages
    assert cache.compression_ratio == pytest.approx(1.47, abs=0.01)
    assert cache.full_fp16_bytes_total == LayerShape(1, 1, 128, 128).full_bytes(1024)


# ---- reading --------------------------------------------------------------------------------


def expected(cache, q: mx.array, n: int) -> np.ndarray:
    """Attention of one query with the rows `select_indices` names, in float64."""
    keys, values = (np.array(a, dtype=np.float64) for a in held_rows(cache))
    out = []
    for h in range(keys.shape[1]):
        heads = q[0, h * 2 : h * 2 + 2, 0]
        rows = np.array(cache.select_indices(heads, 0, h))
        assert len(rows) == n
        assert rows[-1] == cache.size() - 1 or cache.size() % cache.page_size == 0
        logits = np.array(heads, dtype=np.float64) @ keys[0, h, rows].T / 8
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out.extend(weights / weights.sum(-1, keepdims=True) @ values[0, h, rows])
    return np.stack(out)[None, :, None]


@pytest.mark.parametrize("page_size", [None, 1, 5])
def test_a_token_reads_the_pages_it_says_and_no_others(page_size: int | None) -> None:
    cache = compressed(random_tokens(400, seed=7), page_size=page_size)
    assert cache.page_size == (page_size or 2)
    read = -(-25 // cache.page_size) * cache.page_size
    for seed in range(6):
        token = random_tokens(1, seed=100 + seed)
        rows = cache.size()
        out = attend(cache, token)
        assert out.shape == (1, 4, 1, 64)
        assert cache.size() == rows + 1
        wanted = expected(cache, token.queries, read + cache.size() % cache.page_size)
        assert np.abs(np.array(out) - wanted).max() < 1e-4


@pytest.mark.parametrize("form", ["affine4", "turboquant4"])
def test_a_token_reads_packed_pages_and_itself(form: str) -> None:
    cache = compressed(random_tokens(400, seed=7), form=form)
    for seed in range(4):
        before, token = copy.deepcopy(cache), random_tokens(1, seed=100 + seed)
        before.commit()
        fresh = [np.array(a, dtype=np.float64) for a in token[1:]]
        held = [np.array(a, dtype=np.float64) for a in held_rows(before)]
        out, wanted = attend(cache, token), []
        for h in range(2):
            heads = token.queries[0, h * 2 : h * 2 + 2, 0]
            rows = np.array(before.select_indices(heads, 0, h))
            assert len(rows) == 26 + before.size() % 2
            keys, values = (
                np.concatenate([a[0, h, rows], x[0, h]]) for a, x in zip(held, fresh, strict=True)
            )
            weights = np.exp(np.array(heads, dtype=np.float64) @ keys.T / 8)
            wanted.extend(weights / weights.sum(-1, keepdims=True) @ values)
        assert np.abs(np.array(out)[0, :, 0] - np.stack(wanted)).max() < 1e-4


def test_bounds_of_packed_keys_are_packed_and_of_use() -> None:
    """They take what the keys' form does, and most of the pages found are those of exact bounds."""
    tokens = random_tokens(1024, seed=6, heads=1, repeat=1, k_dim=128, dtype=mx.bfloat16)
    cache = compressed(tokens, obs_window=32, form="affine4")
    assert cache.stage1_bytes == 2 * 464 * (64 + 16)
    assert cache.stage2_aux_bytes == cache.stage1_bytes // 2
    keys = held_rows(cache)[0].astype(mx.float32)
    bounds = build_paged_summary_batched(keys, 2)
    stores, shared = (cache.page_max, cache.page_min), []
    coded = [s.decode(0, s.length, mx.float32) for s in stores]
    for seed in range(8):
        q = random_tokens(1, seed=seed, heads=1, repeat=1, k_dim=128).queries[:, :, 0][:, :, None]
        sides = [cache._best(q, *both, scale=128**-0.5) for both in (bounds, coded)]
        exact, packed = (set(a.reshape(-1).tolist()) for a in sides)
        shared.append(len(exact & packed) / len(exact))
    assert np.mean(shared) > 0.8


def test_with_all_channels_and_pages_of_one_row_the_best_rows_are_read() -> None:
    tokens = random_tokens(400, seed=8, heads=1, repeat=1)
    cache = compressed(tokens, page_size=1, head_topk1=64)
    q = random_tokens(1, seed=9, heads=1, repeat=1).queries[0, 0, 0]
    best = np.argsort(-np.array(held_rows(cache)[0][0, 0] @ q))[:25]
    assert cache.select_indices(q, 0, 0).tolist() == sorted(best.tolist())
    recent = cache.select_indices(q, 0, 0, keep_recent=7).tolist()
    assert recent == sorted({*best.tolist(), *range(cache.size() - 7, cache.size())})


def test_planted_matches_are_found() -> None:
    tokens = random_tokens(2048, seed=10, heads=1, repeat=1, k_dim=128)
    q = mx.random.normal((128,), key=mx.random.key(1))
    keys = mx.random.normal((1, 1, 2048, 128), key=mx.random.key(2))
    cache = compressed(tokens._replace(keys=keys))
    rows = np.arange(5, cache.size() - 40, cache.size() // 17)[:16]
    store = mx.array(held_rows(cache)[0])
    store[0, 0, mx.array(rows)] = store[0, 0, mx.array(rows)] + 0.6 * q
    cache.key_rows.replace(store)
    cache.page_max.clear()
    cache.page_min.clear()
    cache._bound()
    found = set(cache.select_indices(q, 0, 0).tolist())
    assert len(found) <= 130
    assert len(found & set(rows.tolist())) >= 15


def test_pages_grow_with_the_rows_and_shrink_with_them() -> None:
    cache, more = compressed(random_tokens(200, seed=11)), random_tokens(9, seed=12)
    feed(cache, more.cut(0, 5), 1)
    before = [np.array(s.decode(0, s.length, mx.float32)) for s in (cache.page_max, cache.page_min)]
    feed(cache, more.cut(5, 9), 1)
    assert cache.page_max.length == cache.size() // 2
    keys = np.array(held_rows(cache)[0])
    pages = keys[:, :, : cache.size() // 2 * 2].reshape(1, 2, -1, 2, 64)
    assert np.array_equal(cache.page_max.decode(0, pages.shape[2], mx.float32), pages.max(3))
    assert np.array_equal(cache.page_min.decode(0, pages.shape[2], mx.float32), pages.min(3))
    assert cache.trim(4) == 4
    for store, old in zip((cache.page_max, cache.page_min), before, strict=True):
        assert np.array_equal(store.decode(0, store.length, mx.float32), old)


def test_another_turn_reads_everything_and_is_compressed() -> None:
    tokens, turn = random_tokens(200, seed=13), random_tokens(50, seed=14)
    cache = compressed(tokens)
    held = cache.size()
    out = attend(cache, turn.cut(0, 49))
    keys, values = held_rows(cache)
    wanted = mx.fast.scaled_dot_product_attention(
        turn.queries[:, :, :49], keys, values, scale=1 / 8, mask="causal"
    )
    assert worst(out, wanted) < 1e-5
    assert cache.size() == held + 49
    attend(cache, turn.cut(49, 50))
    cache.commit()
    assert cache.size() == int(250 / cache.stage1_ratio)
    assert cache.page_max.length == cache.size() // 2


def test_without_queries_everything_held_is_read() -> None:
    tokens = random_tokens(100, seed=15)
    cache = new_cache(config(), shape_of(tokens), views=False)
    feed(cache, tokens.cut(0, 99))
    feed(cache, tokens.cut(99, 100))
    keys, _ = cache.update_and_fetch(tokens.keys[:, :, :1], tokens.values[:, :, :1])
    assert keys.shape[2] == int(100 / cache.stage1_ratio) + 1
    assert cache.fidelity == "proxy"


def test_more_channels_than_a_head_has_are_refused() -> None:
    with pytest.raises(QuantizerConfigError, match="rocketkv_head_topk1=65"):
        new_cache(config(head_topk1=65), shape_of(random_tokens(1)))
    cache = compressed(random_tokens(60))
    with pytest.raises(ValueError, match="D=64"):
        cache.select_indices(mx.zeros(32), 0, 0)
