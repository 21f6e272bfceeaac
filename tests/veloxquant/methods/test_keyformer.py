"""keyformer: noise regularises, temperature flattens, seeds repeat."""

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import Tokens, feed, new_cache, random_tokens, same, shape_of

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import H2OOptions, KeyformerOptions
from veloxquant.methods.keyformer import GumbelAttention, gumbel


def config(**fields) -> KVCacheConfig:
    options = KeyformerOptions(keyformer_budget=24, keyformer_n_sink=2, **fields)
    return KVCacheConfig(method="keyformer", options=options)


def run(tokens: Tokens, setting: KVCacheConfig, *, noise: bool = True):
    cache = new_cache(setting, shape_of(tokens))
    if isinstance(cache.scorer, GumbelAttention):
        cache.scorer.noise = noise
    feed(cache, tokens.cut(0, 60))
    feed(cache, tokens.cut(60, tokens.length), 1)
    cache.commit()
    return cache


def test_one_seed_repeats_and_another_chooses_otherwise() -> None:
    tokens = random_tokens(90, seed=1, factor=0.2)
    first, again = (run(tokens, config(keyformer_seed=3)).kept_positions() for _ in range(2))
    assert same(first, again)
    assert not same(first, run(tokens, config(keyformer_seed=4)).kept_positions())


def test_without_noise_it_is_h2o() -> None:
    tokens = random_tokens(90, seed=2)
    options = H2OOptions(h2o_budget=24, h2o_n_sink=2, h2o_grace=6, h2o_decay=1.0)
    h2o = run(tokens, KVCacheConfig(method="h2o", options=options))
    ours = run(tokens, config(keyformer_recent=6), noise=False)
    assert same(ours.kept_positions(), h2o.kept_positions())
    assert mx.allclose(ours.columns["mass"], h2o.columns["mass"], rtol=1e-4).item()


def test_every_query_gives_exactly_one() -> None:
    tokens = random_tokens(300, seed=3)
    cache = new_cache(KVCacheConfig(method="keyformer"), shape_of(tokens))
    feed(cache, tokens, 70)
    mass = cache.scorer.score(cache).sum(axis=-1)
    assert np.abs(np.array(mass) - 300).max() < 0.3


def test_a_high_temperature_treats_rows_of_equal_age_alike() -> None:
    tokens = random_tokens(200, seed=4)
    shares = []
    for tau in (1.0, 1e3):
        cache = new_cache(
            KVCacheConfig(method="keyformer", options=KeyformerOptions(keyformer_tau=tau)),
            shape_of(tokens),
        )
        feed(cache, tokens)
        mass = np.array(cache.scorer.score(cache))[0, 0]
        shares.append(max(mass[i] / mass[i + 1] for i in range(50, 150)))
    assert shares[1] < 1.1 < shares[0]


def test_the_temperature_rises_by_steps() -> None:
    setting = config(keyformer_tau_init=1.0, keyformer_tau_end=2.0, keyformer_anneal_steps=10)
    scorer = GumbelAttention(setting, 0)
    seen = []
    for steps in (0, 5, 10, 50):
        scorer.steps = steps
        seen.append(scorer.temperature())
    assert seen == [1.0, 1.5, 2.0, 2.0]
    assert GumbelAttention(config(keyformer_tau=3.0), 0).temperature() == 3.0
    assert GumbelAttention(config(keyformer_tau_end=2.0), 0).temperature() == 1.0


def test_noise_is_gumbel() -> None:
    draws = np.array(gumbel((1_000_000,), mx.random.key(0)), dtype=np.float64)
    assert np.isfinite(draws).all()
    assert draws.mean() == pytest.approx(0.577, abs=0.01)
    assert draws.var() == pytest.approx(1.645, abs=0.05)
