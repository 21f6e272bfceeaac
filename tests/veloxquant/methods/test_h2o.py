"""h2o: who collects attention stays, however long ago it came."""

import mlx.core as mx
import pytest
from cache_lab import Tokens, attend, feed, new_cache, random_tokens, same, shape_of

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import H2OOptions
from veloxquant.core.exceptions import QuantizerConfigError


def config(budget: int = 32, sink: int = 4, grace: int = 8, decay: float = 1.0) -> KVCacheConfig:
    options = H2OOptions(h2o_budget=budget, h2o_n_sink=sink, h2o_grace=grace, h2o_decay=decay)
    return KVCacheConfig(method="h2o", options=options)


def places(cache) -> list[int]:
    cache.commit()
    return cache.kept_positions()[0, 0].tolist()


def test_a_token_that_everybody_looks_at_survives_ten_budgets() -> None:
    tokens = random_tokens(380, seed=1, heads=1, repeat=1)
    direction = mx.zeros((64,)).at[5].add(8.0)
    keys = 0.3 * tokens.keys
    keys[:, :, 20] = 8 * direction / 8
    tokens = Tokens(0.3 * tokens.queries + direction, keys, tokens.values)
    cache = new_cache(config(), shape_of(tokens))
    feed(cache, tokens.cut(0, 60))
    feed(cache, tokens.cut(60, 380), 1)
    assert 20 in places(cache)
    assert cache.size() == 32


def test_with_equal_shares_the_youngest_candidate_goes() -> None:
    """With equal keys every row a query sees gets the same share: older rows collect more."""
    tokens = random_tokens(60, seed=2, heads=1, repeat=1)
    tokens = tokens._replace(keys=mx.ones(tokens.keys.shape))
    cache = new_cache(config(budget=20, sink=2, grace=3), shape_of(tokens))
    feed(cache, tokens, 1)
    # The youngest row outside the grace window has the smallest sum, every time.
    assert places(cache) == [*range(16), 56, 57, 58, 59]


def test_decay_forgets_old_queries() -> None:
    tokens = random_tokens(200, seed=3, heads=1, repeat=1)
    queries, keys = 0.1 * tokens.queries, 0.1 * tokens.keys
    keys[:, :, 10, 5], keys[:, :, 11, 6] = 30.0, 30.0
    queries[:, :, :150, 5] = 2.0
    queries[:, :, 150:, 6] = 2.0
    tokens = Tokens(queries, keys, tokens.values)
    mass = []
    for decay in (1.0, 0.9):
        cache = new_cache(config(100, decay=decay), shape_of(tokens))
        feed(cache, tokens.cut(0, 199))
        attend(cache, tokens.cut(199, 200))
        mass.append(cache.columns["mass"][0, 0, 10:12].tolist())
    assert mass[0][0] > mass[0][1]
    assert mass[1][0] < mass[1][1]


def test_what_is_gone_does_not_come_back() -> None:
    tokens = random_tokens(100, seed=4)
    cache = new_cache(config(decay=0.98), shape_of(tokens))
    feed(cache, tokens.cut(0, 50))
    before = None
    for at in range(50, 100):
        attend(cache, tokens.cut(at, at + 1))
        now = set(places(cache))
        assert before is None or now <= before | {at}
        before = now


def test_under_the_budget_it_is_the_plain_cache() -> None:
    tokens = random_tokens(32, seed=5)
    cache = new_cache(config(), shape_of(tokens))
    plain = new_cache(KVCacheConfig(method="fp16"), shape_of(tokens))
    assert same(feed(cache, tokens, 8), feed(plain, tokens, 8))
    assert cache.evicted == 0
    assert cache.h2o_kept_bytes == 2 * 32 * 64 * 4 * 2


def test_without_queries_it_says_so() -> None:
    tokens = random_tokens(80, seed=6)
    cache = new_cache(config(), shape_of(tokens), views=False)
    feed(cache, tokens.cut(0, 70))
    assert cache.fidelity == "exact"
    feed(cache, tokens.cut(70, 80), 1)
    assert cache.fidelity == "proxy"
    assert cache.size() == 32


@pytest.mark.parametrize("bad", [12, 1])
def test_a_budget_for_sinks_and_newcomers_only_is_refused(bad: int) -> None:
    tokens = random_tokens(1)
    with pytest.raises(QuantizerConfigError, match=r"h2o_n_sink \+ h2o_grace = 12"):
        new_cache(config(budget=bad), shape_of(tokens))
