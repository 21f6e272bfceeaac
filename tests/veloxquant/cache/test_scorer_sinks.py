"""Learned sinks of a layer take their share in every score that comes from the model's queries."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import (
    EVICTING,
    attend,
    feed,
    new_cache,
    pieces,
    random_tokens,
    same_state,
    shape_of,
    small_config,
)

from tests.architectures import feed as feed_model
from tests.architectures import prompt, tiny, uncompiled
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.evicting import EvictingCache
from veloxquant.cache.scorers import (
    CumulativeAttention,
    LastQuery,
    QueryScorer,
    WindowAttention,
    WindowLogits,
)
from veloxquant.cache.table import row_of
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import H2OOptions
from veloxquant.core.exceptions import CacheStateError
from veloxquant.methods.kvzip import StrongestAttention

SCALE, HEADS, REPEAT, ROWS, DIM = 32**-0.5, 2, 2, 60, 32
SINKS = mx.array([2.0, -1.0, 0.5, 3.0])
# squeeze keeps the newest rows; morphkv adds the logits of a group up before its softmax.
BY_HEAD = [r.name for r in EVICTING if r.queries != "none" and r.name not in ("squeeze", "morphkv")]


class Held:
    """Rows as a scorer sees them."""

    def __init__(self, keys: mx.array) -> None:
        self.held, self.columns = keys, {}

    @property
    def rows(self) -> int:
        return self.held.shape[2]

    def keys(self, stop: int | None = None) -> mx.array:
        return self.held[:, :, :stop]


def rows_and_queries() -> tuple[Held, mx.array]:
    draws = mx.random.split(mx.random.key(7))
    keys = mx.random.normal((1, HEADS, ROWS, DIM), key=draws[0])
    return Held(keys), mx.random.normal((1, HEADS * REPEAT, ROWS, DIM), key=draws[1])


def scored(scorer: QueryScorer, sinks: mx.array | None, cuts: tuple[int, ...] = ()) -> np.ndarray:
    """Scores after a prompt that came in pieces."""
    held, queries = rows_and_queries()
    keys = held.held
    for start, stop in zip((0, *cuts), (*cuts, ROWS), strict=True):
        held.held = keys[:, :, :stop]
        scorer.append(held, keys[:, :, start:stop])
        scorer.observe(held, queries[:, :, start:stop], SCALE, sinks)
    return np.array(scorer.score(held))


def weights(sinks: np.ndarray, *, to: slice = slice(None), joined: bool = False) -> np.ndarray:
    """(H, G, T, n) in float64; `joined` adds the logits of a group up first."""
    held, queries = rows_and_queries()
    q = np.array(queries, dtype=np.float64)[0].reshape(HEADS, REPEAT, ROWS, DIM)
    k = np.array(held.held, dtype=np.float64)[0][:, None]
    logits = np.where(np.tril(np.ones((ROWS, ROWS), bool)), q @ k.swapaxes(-1, -2) * SCALE, -np.inf)
    edges = sinks.astype(np.float64).reshape(HEADS, REPEAT, 1, 1)
    if joined:
        logits, edges = logits.sum(1, keepdims=True), edges.sum(1, keepdims=True)
    logits = logits[..., to]
    shares = np.exp(logits)
    return shares / (shares.sum(-1, keepdims=True) + np.exp(edges))


def pooled(mass: np.ndarray, kernel: int) -> np.ndarray:
    side = kernel // 2
    wide = np.pad(mass, [(0, 0)] * (mass.ndim - 1) + [(side, side)])
    return np.stack([wide[..., i : i + mass.shape[-1]] for i in range(kernel)]).mean(0)


@pytest.mark.parametrize("cuts", [(), (13, 59)])
def test_scores_are_those_of_a_softmax_with_the_sinks(cuts: tuple[int, ...]) -> None:
    w = weights(np.array(SINKS))
    window = w[:, :, -8:, :].sum(2).mean(1)
    got = scored(WindowAttention(8, 5), SINKS, cuts)[0, :, : ROWS - 8]
    np.testing.assert_allclose(got, pooled(window[:, : ROWS - 8], 5), atol=1e-5)
    got = scored(LastQuery(), SINKS, cuts)[0, 0]
    np.testing.assert_allclose(got, w[:, :, -1].mean((0, 1)), atol=1e-5)
    got = scored(CumulativeAttention(), SINKS, cuts)[0]
    np.testing.assert_allclose(got, w.mean(1).sum(1), atol=1e-4)
    far = np.tril(np.ones((ROWS, ROWS)), -2)
    got = scored(StrongestAttention(), SINKS, cuts)[0]
    np.testing.assert_allclose(got, (w * far).max((1, 2)), atol=1e-5)
    joined = weights(np.array(SINKS), to=slice(4, ROWS - 8), joined=True)
    got = scored(WindowLogits(8, 4, 8), SINKS, cuts)[0, :, 4 : ROWS - 8]
    np.testing.assert_allclose(got, joined[:, 0, -8:].sum(1), atol=1e-5)


@pytest.mark.parametrize(
    "scorer", [WindowAttention(8, 5), LastQuery(), CumulativeAttention(), WindowLogits(8, 4, 8)]
)
def test_a_huge_sink_leaves_almost_nothing(scorer: QueryScorer) -> None:
    assert 0 < np.abs(scored(scorer, mx.full((4,), 20.0))).max() < 1e-3


@pytest.mark.parametrize("name", BY_HEAD)
def test_a_head_whose_sink_takes_all_has_no_say(name: str) -> None:
    """Kept rows are those that the other heads of its group want alone."""
    tokens = random_tokens(140, seed=3, heads=2, repeat=2)
    config, sinks = small_config(row_of(name)), mx.array([60.0, 0.0, 0.0, 60.0])
    loud = mx.where(sinks[:, None, None] > 0, -7 * tokens.queries, tokens.queries)
    deaf = tokens._replace(queries=loud)
    places = []
    for own, edges in [(tokens, sinks), (deaf, sinks), (tokens, None)]:
        cache = new_cache(config, shape_of(own))
        for start, stop in [(0, 100), (100, 139), (139, 140)]:
            q, k, v = own.cut(start, stop)
            mask = cache.make_mask(stop - start)
            views = cache.update_and_fetch(k, v)
            mx.eval(views[0].attend(q, views[1], 64**-0.5, mask, edges))
        cache.commit()
        assert cache.evicted
        places.append(cache.kept_positions().tolist())
    assert places[0] == places[1]
    assert places[0] != places[2]


@pytest.mark.parametrize("name", ["h2o", "snapkv", "morphkv", "keyformer"])
def test_a_state_brings_the_sinks(name: str) -> None:
    tokens = random_tokens(90, seed=5)
    config = small_config(row_of(name))
    caches = [new_cache(config, shape_of(tokens)) for _ in range(2)]
    feed_with_sinks(caches[0], tokens.cut(0, 60), 23)
    caches[1].state = caches[0].state
    for cache in caches:
        feed_with_sinks(cache, tokens.cut(60, 90), 29)
        cache.commit()
    same_state(*caches)
    scorer = caches[1].scorer
    bad = scorer.saved()
    bad[2] = mx.zeros((3, 3))
    with pytest.raises(CacheStateError, match="not the sinks"):
        scorer.restore(bad)


def feed_with_sinks(cache: Any, tokens: Any, size: int) -> None:
    for start, stop in pieces(tokens.length, size):
        mx.eval(attend(cache, tokens.cut(start, stop), SINKS))


def test_sinks_of_a_model_reach_the_scorers() -> None:
    with uncompiled():
        model = tiny("gpt_oss")
        config = KVCacheConfig(method="h2o", options=H2OOptions(h2o_decay=1.0))
        caches = new_caches(plan_model(model, config), config)
        cache = caches[1]
        assert isinstance(cache, EvictingCache)
        feed_model(model, prompt(30), caches)
        feed_model(model, [5], caches)
    scorer: Any = cache.scorer
    layer = model.layers[1]
    assert mx.array_equal(scorer.ring.sinks, layer.self_attn.sinks).item()
    mass = cache.columns["mass"].sum(axis=-1)
    assert (mass < 31 * 0.95).all().item()
    plain = new_cache(config, shape_of(random_tokens(31)))
    feed(plain, random_tokens(31), 30)
    assert plain.columns["mass"].sum(axis=-1).tolist()[0] == pytest.approx([31, 31], rel=1e-4)
