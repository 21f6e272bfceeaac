"""knorm: small keys stay, and it does not matter when the others go."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cache_lab import feed, new_cache, random_tokens, same, same_state, shape_of

from veloxquant.cache.scorers import KeyNorm
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import L2NormOptions


def config(recent: int = 0, keep: str = "low") -> KVCacheConfig:
    options = L2NormOptions(knorm_budget=24, knorm_n_sink=2, knorm_recent=recent, knorm_keep=keep)
    return KVCacheConfig(method="knorm", options=options)


@pytest.mark.parametrize("recent", [0, 5])
def test_the_same_rows_stay_however_they_came(recent: int) -> None:
    tokens = random_tokens(150, seed=1)
    caches = []
    for size in (1, 5, 64, None):
        cache = new_cache(config(recent), shape_of(tokens))
        feed(cache, tokens, size)
        cache.commit()
        assert cache.size() == 24
        caches.append(cache)
    for other in caches[1:]:
        same_state(caches[0], other)


@pytest.mark.parametrize("keep", ["low", "high"])
def test_no_row_that_is_gone_is_better_than_one_that_stayed(keep: str) -> None:
    tokens = random_tokens(120, seed=2)
    cache = new_cache(config(3, keep), shape_of(tokens))
    feed(cache, tokens, 50)
    cache.commit()
    norms = np.linalg.norm(np.array(tokens.keys, dtype=np.float64), axis=-1)
    for head in range(2):
        places = cache.kept_positions()[0, head].tolist()
        assert places[:2] == [0, 1]
        assert places[-3:] == [117, 118, 119]
        free = [norms[0, head, p] for p in places[2:-3]]
        gone = [norms[0, head, p] for p in range(120) if p not in places]
        assert max(free) <= min(gone) if keep == "low" else min(free) >= max(gone)


def test_a_factor_changes_nothing() -> None:
    tokens = random_tokens(100, seed=3)
    kept = []
    for one in (tokens, tokens._replace(keys=7 * tokens.keys)):
        cache = new_cache(config(), shape_of(tokens))
        feed(cache, one, 30)
        cache.commit()
        kept.append(cache.kept_positions())
    assert same(*kept)


def test_rotation_does_not_change_the_score() -> None:
    keys = random_tokens(50, seed=4).keys
    a, b = KeyNorm().rate(keys), KeyNorm().rate(nn.RoPE(64)(keys, offset=1000))
    assert mx.abs(a / b - 1).max().item() < 1e-5


def test_the_peak_of_a_long_prompt_is_a_chunk() -> None:
    tokens = random_tokens(400, seed=5)
    cache, most = new_cache(config(), shape_of(tokens)), 0
    for start in range(0, 400, 50):
        feed(cache, tokens.cut(start, start + 50))
        most = max(most, cache.size())
    assert most == 74
