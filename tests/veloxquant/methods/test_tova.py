"""tova: the newest query decides, for the whole layer."""

import mlx.core as mx
import numpy as np
from cache_lab import Tokens, attend, feed, new_cache, random_tokens, shape_of

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import TOVAOptions


def config(budget: int = 24, sink: int = 2) -> KVCacheConfig:
    options = TOVAOptions(tova_budget=budget, tova_n_sink=sink)
    return KVCacheConfig(method="tova", options=options)


def test_each_step_drops_what_the_last_query_attends_to_least() -> None:
    tokens = random_tokens(90, seed=1, heads=2, repeat=2)
    cache = new_cache(config(), shape_of(tokens))
    feed(cache, tokens.cut(0, 60))
    attend(cache, tokens.cut(60, 61))
    cache.commit()
    held = cache.kept_positions()[0, 0].tolist()
    q, k = (np.array(a, dtype=np.float64) for a in tokens[:2])
    for at in range(61, 90):
        rows = k[0, :, held]
        logits = q[0, :, at - 1].reshape(2, 2, 64) @ rows.transpose(1, 2, 0) / 8
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        mean = (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=(0, 1))
        order = np.sort(mean[2:-1])
        attend(cache, tokens.cut(at, at + 1))
        now = cache.kept_positions()[0, 0].tolist()
        if order[1] - order[0] > 1e-6:
            assert now == [p for p in held if p != held[2 + int(np.argmin(mean[2:-1]))]] + [at]
        held = now


def test_heads_share_their_positions() -> None:
    tokens = random_tokens(60, seed=2, heads=3)
    cache = new_cache(config(), shape_of(tokens))
    feed(cache, tokens.cut(0, 55))
    feed(cache, tokens.cut(55, 60), 1)
    assert cache.kept_positions().shape == (1, 1, 24)


def test_a_uniform_query_drops_the_oldest() -> None:
    tokens = random_tokens(40, seed=3)
    tokens = tokens._replace(queries=mx.zeros(tokens.queries.shape))
    cache = new_cache(config(), shape_of(tokens))
    feed(cache, tokens, 1)
    assert cache.kept_positions()[0, 0].tolist() == [0, 1, *range(18, 40)]


def test_a_sink_that_every_query_likes_needs_no_protection() -> None:
    tokens = random_tokens(120, seed=4)
    keys, queries = 0.2 * tokens.keys, 0.2 * tokens.queries
    queries[..., 7] = 3.0
    keys[:, :, 0, 7] = 30.0
    cache = new_cache(config(sink=0), shape_of(tokens))
    feed(cache, Tokens(queries, keys, tokens.values), 1)
    assert cache.kept_positions()[0, 0, 0].item() == 0
