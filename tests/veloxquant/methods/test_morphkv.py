"""morphkv: the present decides which part of the past stays."""

import numpy as np
from cache_lab import Tokens, attend, feed, new_cache, random_tokens, shape_of

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import MorphKVOptions

WINDOW = 4


def config(window: int = WINDOW) -> KVCacheConfig:
    options = MorphKVOptions(morphkv_budget=24, morphkv_n_sink=2, morphkv_window=window)
    return KVCacheConfig(method="morphkv", options=options)


def test_scores_are_the_softmax_of_summed_logits_over_the_candidates() -> None:
    tokens = random_tokens(20, seed=1, heads=2, repeat=3)
    cache = new_cache(config(), shape_of(tokens))
    feed(cache, tokens.cut(0, 12))
    feed(cache, tokens.cut(12, 20), 1)
    q, k = (np.array(a, dtype=np.float64) for a in tokens[:2])
    logits = q[0, :, -WINDOW:].reshape(2, 3, WINDOW, 64).sum(axis=1) @ k[0].swapaxes(-1, -2) / 8
    part = logits[..., 2 : 20 - WINDOW - 1]
    weights = np.exp(part - part.max(axis=-1, keepdims=True))
    wanted = (weights / weights.sum(axis=-1, keepdims=True)).sum(axis=1)
    got = np.array(cache.scorer.score(cache))[0]
    assert np.abs(got[:, 2 : 20 - WINDOW - 1] - wanted).max() < 1e-4
    assert not got[:, :2].any()


def test_attention_that_moves_on_takes_the_rows_with_it() -> None:
    tokens = random_tokens(120, seed=2, heads=1, repeat=1)
    queries, keys = 0.1 * tokens.queries, 0.1 * tokens.keys
    keys[:, :, 10, 5], keys[:, :, 11, 6] = 20.0, 20.0
    keys[:, :, 12:, 5] -= 4.0
    queries[:, :, :80, 5], queries[:, :, 80:, 6] = 2.0, 2.0
    queries[:, :, 80:, 5] = -2.0
    tokens = Tokens(queries, keys, tokens.values)
    cache = new_cache(config(), shape_of(tokens))
    feed(cache, tokens.cut(0, 60))
    feed(cache, tokens.cut(60, 80), 1)
    assert 10 in cache.kept_positions()[0, 0].tolist()
    kept = 11 in cache.kept_positions()[0, 0].tolist()
    feed(cache, tokens.cut(80, 120), 1)
    places = cache.kept_positions()[0, 0].tolist()
    assert 10 not in places
    assert kept == (11 in places)


def test_a_window_of_one_is_tova_by_head_among_the_candidates() -> None:
    tokens = random_tokens(60, seed=3, heads=2, repeat=1)
    cache = new_cache(config(1), shape_of(tokens))
    feed(cache, tokens.cut(0, 40))
    attend(cache, tokens.cut(40, 41))
    cache.commit()
    logits = (tokens.queries[:, :, 40:41] @ tokens.keys[:, :, :41].swapaxes(-1, -2))[0, :, 0]
    for head in range(2):
        middle = np.array(logits[head])[2:39]
        best = np.sort(np.argsort(-middle)[:20]) + 2
        assert cache.kept_positions()[0, head].tolist() == [0, 1, *best.tolist(), 39, 40]


def test_memory_does_not_grow_over_ten_budgets() -> None:
    tokens = random_tokens(240, seed=4, heads=1)
    cache, sizes = new_cache(config(), shape_of(tokens)), set()
    for at in range(240):
        attend(cache, tokens.cut(at, at + 1))
        if at > 24:
            sizes.add(cache.nbytes)
            assert cache.size() == 24
    assert len(sizes) == 1
