"""qfilters: directions of queries, the order they give, fallbacks and the guard."""

import logging

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import Tokens, attend, feed, held_rows, new_cache, random_tokens, same, shape_of

from veloxquant.cache.builder import build_layer
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import QFiltersOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.methods import qfilters

BUDGET, COUNT = 32, 16


def config(**fields) -> KVCacheConfig:
    options = {"qfilters_budget": BUDGET, "qfilters_calib_tokens": COUNT, **fields}
    return KVCacheConfig(method="qfilters", options=QFiltersOptions(**options))


def calibrated(tokens: Tokens, filters: mx.array, **fields):
    context = LayerContext(artifacts={"filters": filters}, views=True)
    return build_layer(config(**fields), shape_of(tokens), context)


def planted(length: int = 100, *, seed: int = 1, heads: int = 2) -> tuple[Tokens, mx.array]:
    """Queries around 3·u of each KV head, keys a_j·u with noise."""
    base = random_tokens(length, seed=seed, heads=heads)
    draws = mx.random.split(mx.random.key(seed + 100), 3)
    u = mx.random.normal((heads, 64), key=draws[0])
    u = u / mx.linalg.norm(u, axis=-1, keepdims=True)
    q = 3 * mx.repeat(u, 2, axis=0)[None, :, None] + mx.random.normal(
        base.queries.shape, key=draws[1]
    )
    a = 4 * mx.random.normal((1, heads, length, 1), key=draws[2])
    keys = a * u[None, :, None] + 0.1 * base.keys / 8
    return Tokens(q, keys, base.values), u


def expected(scores: mx.array, budget: int = BUDGET, n_sink: int = 4) -> list[list[int]]:
    """Sinks, the newest row, and the best of the rest."""
    out = []
    for row in np.array(scores):
        middle = np.arange(n_sink, len(row) - 1)
        best = middle[np.argsort(-row[middle], kind="stable")][: budget - n_sink - 1]
        out.append(sorted([*range(n_sink), *best.tolist(), len(row) - 1]))
    return out


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_along_the_filter_stay_and_the_sign_turns_that(sign: int) -> None:
    tokens, u = planted()
    cache = calibrated(tokens, u, qfilters_sign=sign)
    feed(cache, tokens, 37)
    cache.commit()
    scores = sign * (tokens.keys[0] * u[:, None]).sum(-1)
    assert cache.kept_positions()[0].tolist() == expected(scores)
    assert cache.fidelity == "exact"
    assert cache.filter_scorer.source == "calibration"


@pytest.mark.parametrize("size", [1, 7, 100])
def test_kept_sets_do_not_depend_on_the_pieces(size: int) -> None:
    tokens, u = planted(seed=2)
    whole, cut = calibrated(tokens, u), calibrated(tokens, u)
    feed(whole, tokens)
    feed(cut, tokens, size)
    whole.commit()
    cut.commit()
    assert same(whole.kept_positions(), cut.kept_positions())
    assert whole.size() == BUDGET


def test_sinks_and_recent_rows_are_bit_exact() -> None:
    tokens, u = planted(seed=3)
    cache = calibrated(tokens, u, qfilters_recent=5)
    feed(cache, tokens, 20)
    cache.commit()
    for rows, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert same(rows[:, :, :4], true[:, :, :4])
        assert same(rows[:, :, -5:], true[:, :, -5:])


def test_the_prompts_own_queries_rank_keys_as_true_logits_do() -> None:
    tokens, _ = planted(400, seed=4)
    cache = new_cache(config(qfilters_calib_tokens=128), shape_of(tokens))
    feed(cache, tokens)
    cache.commit()
    assert cache.filter_scorer.source == "queries"
    assert cache.fidelity == "exact"
    found = cache.filter_scorer.rate(tokens.keys)[0]
    mean = tokens.queries.reshape(2, -1, 64).mean(axis=1)
    truth = (tokens.keys[0] * mean[:, None]).sum(-1)
    for a, b in zip(np.array(found), np.array(truth), strict=True):
        ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
        assert np.corrcoef(*ranks)[0, 1] >= 0.95


def test_nothing_goes_before_there_are_tokens_enough() -> None:
    tokens, _ = planted(60, seed=5)
    cache = new_cache(config(qfilters_calib_tokens=50), shape_of(tokens))
    feed(cache, tokens.cut(0, 49), 1)
    cache.commit()
    assert cache.size() == 49
    feed(cache, tokens.cut(49, 52), 1)
    cache.commit()
    assert cache.size() == BUDGET
    assert not list(cache.filter_scorer.first.arrays())


def test_without_queries_the_filter_is_against_the_keys() -> None:
    tokens, u = planted(seed=6)
    # Keys that mostly lie against the queries, as in most heads of real models.
    tokens = tokens._replace(keys=tokens.keys - 6 * u[None, :, None])
    cache = new_cache(config(qfilters_min_retention=None), shape_of(tokens), views=False)
    feed(cache, tokens, 30)
    cache.commit()
    assert cache.fidelity == "proxy"
    assert cache.filter_scorer.source == "keys"
    along = (cache.filter_scorer.filters[0] * u).sum(-1)
    assert along.min().item() > 0.9


def test_a_rewound_prompt_forgets_its_queries() -> None:
    tokens, _ = planted(30, seed=7)
    other, _ = planted(100, seed=8)
    one = new_cache(config(), shape_of(tokens))
    feed(one, tokens)
    assert one.trim(25) == 25
    two = new_cache(config(), shape_of(tokens))
    feed(two, tokens.cut(0, 5))
    for cache in (one, two):
        feed(cache, other, 50)
        cache.commit()
    assert same(one.filter_scorer.filters, two.filter_scorer.filters)
    assert same(one.kept_positions(), two.kept_positions())


def test_filters_of_a_sample_are_means_of_their_query_heads() -> None:
    tokens, u = planted(300, seed=9)
    sample = LayerSample(
        0, 1, shape_of(tokens), tokens.keys[0], tokens.values[0], tokens.queries[0],
        mx.arange(300),
    )  # fmt: skip
    found = qfilters.fit(sample=sample, config=config())["filters"]
    assert found.shape == (2, 64)
    assert (found * u).sum(-1).min().item() > 0.95
    cache = calibrated(tokens, found)
    attend(cache, tokens)
    cache.commit()
    assert cache.size() == BUDGET
    with pytest.raises(QuantizerConfigError, match="cannot be seen"):
        qfilters.fit(sample=sample._replace(queries=None), config=config())


def test_filters_of_another_model_are_refused() -> None:
    tokens, u = planted(10)
    with pytest.raises(QuantizerConfigError, match="do not fit 2 KV heads of 64"):
        calibrated(tokens, u[:, :32])


# ---- the guard ------------------------------------------------------------------------------


def test_the_guard_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    tokens, u = planted(seed=10)
    cache = calibrated(tokens, -u)
    with caplog.at_level(logging.WARNING, logger=qfilters.__name__):
        feed(cache, tokens, 50)
        feed(cache, tokens, 50)
        cache.commit()
    assert [r.message.count("qfilters_min_retention=0.9") for r in caplog.records] == [1]


@pytest.mark.parametrize(
    "fields", [{"qfilters_on_low_retention": "ignore"}, {"qfilters_min_retention": None}]
)
def test_the_guard_can_be_switched_off(fields: dict, caplog: pytest.LogCaptureFixture) -> None:
    tokens, u = planted(seed=11)
    feed(calibrated(tokens, -u, **fields), tokens, 50)
    assert not caplog.records


def test_a_good_filter_passes_the_guard_and_a_bad_one_raises() -> None:
    tokens, u = planted(seed=12)
    fields = {"qfilters_on_low_retention": "raise", "qfilters_min_retention": 0.5}
    feed(calibrated(tokens, u, **fields), tokens, 50)
    bad = calibrated(tokens, -u, **fields)
    attend(bad, tokens.cut(0, 50))
    with pytest.raises(QuantizerConfigError, match=r"qfilters_min_retention=0\.5"):
        bad.commit()
    assert bad.size() == 50
