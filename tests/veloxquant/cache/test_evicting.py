"""Selecting, scoring and evicting: the parts that every evicting method is made of."""

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import Tokens, attend, feed, held_rows, random_tokens, same, shape_of

from veloxquant.cache.attention_rows import attention_rows
from veloxquant.cache.evicting import EvictingCache, Policy
from veloxquant.cache.scorers import CumulativeAttention, LastQuery, Recency, Scorer
from veloxquant.cache.selection import average_pool, left_out, max_pool, select_rows
from veloxquant.core.exceptions import CacheStateError


def made(tokens: Tokens, policy: Policy, scorer: Scorer) -> EvictingCache:
    cache = EvictingCache(shape_of(tokens), "h2o", policy, scorer)
    cache.returns = "views"
    return cache


def reference(tokens: Tokens) -> np.ndarray:
    """Causal attention in float64, (B, H, G, T, T)."""
    q, k = (np.array(a, dtype=np.float64) for a in tokens[:2])
    batch, n_q, count, dim = q.shape
    q = q.reshape(batch, k.shape[1], n_q // k.shape[1], count, dim)
    logits = q @ k[:, :, None].swapaxes(-1, -2) * dim**-0.5
    logits[..., ~np.tril(np.ones((count, count), dtype=bool))] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


# ---- selection ------------------------------------------------------------------------------


@pytest.mark.parametrize("later_wins", [False, True])
@pytest.mark.parametrize("budget", [7, 9, 10])
def test_forced_rows_and_the_best_stay_and_ties_follow_the_rule(
    budget: int, *, later_wins: bool
) -> None:
    scores = mx.array([[[0, 0, 5, 1, 1, 1, 7, 1, 0, 0]]], dtype=mx.float32)
    keep = select_rows(scores, budget, 2, 1, later_wins=later_wins).tolist()[0][0]
    assert keep == sorted(keep)
    assert len(keep) == budget
    assert {0, 1, 2, 6, 9} <= set(keep)
    assert (8 in keep) == (budget == 10)
    ones = [i for i in keep if i in (3, 4, 5, 7)]
    if budget == 7:
        assert ones == ([5, 7] if later_wins else [3, 4])


@pytest.mark.parametrize("later_wins", [False, True])
def test_one_eviction_is_that_of_the_sort(*, later_wins: bool) -> None:
    scores = mx.random.randint(0, 4, (3, 2, 40), key=mx.random.key(0)).astype(mx.float32)
    fast = select_rows(scores, 39, 4, 3, later_wins=later_wins)
    lost = left_out(fast, 40)
    slow = select_rows(scores, 38, 4, 3, later_wins=later_wins)
    for b, h in np.ndindex(3, 2):
        gone = int(lost[b, h, 0].item())
        middle = np.array(scores[b, h])[4:37]
        worst = np.flatnonzero(middle == middle.min()) + 4
        assert gone == (worst[0] if later_wins else worst[-1])
        assert gone not in slow[b, h].tolist()


def test_a_score_that_is_no_number_is_the_worst() -> None:
    scores = mx.array([[[1.0, float("nan"), 3.0, 2.0]]])
    assert select_rows(scores, 3, 0, 0).tolist() == [[[0, 2, 3]]]
    assert select_rows(scores, 2, 0, 0).tolist() == [[[2, 3]]]


def test_what_is_left_out() -> None:
    keep = mx.array([[[0, 2, 5], [1, 2, 3]]], dtype=mx.int32)
    assert left_out(keep, 6).tolist() == [[[1, 3, 4], [0, 4, 5]]]


def test_pools() -> None:
    x = mx.array([[[1.0, 2.0, 6.0, 0.0]]])
    assert average_pool(x, 3).tolist()[0][0] == pytest.approx([1.0, 3.0, 8 / 3, 2.0])
    assert max_pool(x, 3).tolist() == [[[2.0, 6.0, 6.0, 6.0]]]


# ---- scores ---------------------------------------------------------------------------------


def test_attention_rows_are_those_of_a_float64_softmax() -> None:
    tokens = random_tokens(40, seed=1, batch=2)
    rows = attention_rows(tokens.queries[:, :, 30:], tokens.keys, 64**-0.5, 30)
    assert np.abs(np.array(rows) - reference(tokens)[..., 30:, :]).max() < 1e-5
    assert np.array(rows)[..., 0, 31:].max() == 0


@pytest.mark.parametrize("decay", [1.0, 0.98])
@pytest.mark.parametrize("size", [7, 64, 256, 300])
def test_collected_attention_is_that_of_all_queries(decay: float, size: int) -> None:
    tokens = random_tokens(300, seed=2, heads=2, repeat=2)
    cache = made(tokens, Policy(1000), scorer := CumulativeAttention(decay=decay))
    feed(cache, tokens, size)
    got = np.array(scorer.score(cache))
    weights = reference(tokens).mean(axis=2) * decay ** np.arange(299, -1, -1.0)[:, None]
    wanted = weights.sum(axis=-2)
    assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max()
    if decay == 1.0:
        assert got.sum(axis=-1) == pytest.approx(np.full((1, 2), 300.0), rel=1e-4)


def test_the_best_attention_of_any_query() -> None:
    tokens = random_tokens(60, seed=3)
    cache = made(tokens, Policy(1000), scorer := CumulativeAttention("max", "max"))
    feed(cache, tokens)
    wanted = reference(tokens).max(axis=(2, 3))
    assert np.abs(np.array(scorer.score(cache)) - wanted).max() < 1e-5


def test_equal_query_heads_change_nothing() -> None:
    one = random_tokens(60, seed=4, heads=2, repeat=1)
    twice = one._replace(queries=mx.repeat(one.queries, 2, axis=1))
    scores = []
    for tokens in (one, twice):
        cache = made(tokens, Policy(1000), scorer := CumulativeAttention())
        feed(cache, tokens)
        scores.append(np.array(scorer.score(cache)))
    assert np.abs(scores[0] - scores[1]).max() < 1e-5


# ---- the cache ------------------------------------------------------------------------------


def test_rows_are_copies_at_ascending_positions_after_every_step() -> None:
    tokens = random_tokens(90, seed=5, batch=2)
    cache = made(tokens, Policy(24, 3, 5), CumulativeAttention())
    feed(cache, tokens.cut(0, 60))
    for at in range(60, 90):
        attend(cache, tokens.cut(at, at + 1))
        if at == 60:
            assert cache.size() == 61, "the last token of a prompt sees all of it"
        else:
            assert cache.size() == 24
        cache.commit()
        assert cache.size() == 24
        places = np.array(cache.kept_positions())
        assert places.shape == (2, 2, 24)
        assert (np.diff(places, axis=-1) > 0).all()
        assert (places[..., :3] == np.arange(3)).all()
        assert (places[..., -5:] == np.arange(at - 4, at + 1)).all()
        for rows, true in zip(held_rows(cache), tokens[1:], strict=True):
            picked = np.take_along_axis(np.array(true), places[..., None], axis=2)
            assert np.array_equal(np.array(rows), picked)
        assert cache.columns["mass"].shape == (2, 2, 24)


def test_a_single_list_serves_all_heads() -> None:
    tokens = random_tokens(80, seed=6, batch=2, heads=3)
    cache = made(tokens, Policy(20, 2, 1), LastQuery())
    feed(cache, tokens.cut(0, 70))
    feed(cache, tokens.cut(70, 80), 1)
    assert cache.kept_positions().shape == (2, 1, 20)


def test_recency_is_a_window() -> None:
    tokens = random_tokens(50, seed=7)
    cache = made(tokens, Policy(20, 4), Recency())
    feed(cache, tokens, 9)
    cache.commit()
    assert cache.kept_positions()[0, 0].tolist() == [*range(4), *range(34, 50)]


def test_the_same_rows_stay_whether_or_not_the_state_is_looked_at() -> None:
    tokens = random_tokens(80, seed=8)
    caches = [made(tokens, Policy(20, 2, 2), CumulativeAttention()) for _ in range(2)]
    for cache in caches:
        feed(cache, tokens.cut(0, 50), 25)
    for at in range(50, 80):
        for cache in caches:
            attend(cache, tokens.cut(at, at + 1))
        mx.eval(caches[0].state)
    assert same(caches[0].kept_positions(), caches[1].kept_positions())


def test_a_column_of_another_length_is_refused() -> None:
    tokens = random_tokens(60, seed=9)
    cache = made(tokens, Policy(20, 2, 2), CumulativeAttention())
    feed(cache, tokens.cut(0, 50))
    feed(cache, tokens.cut(50, 60), 1)
    state = cache.state
    state[-1][4]["mass"] = state[-1][4]["mass"][..., 1:]
    twin = made(tokens, Policy(20, 2, 2), CumulativeAttention())
    with pytest.raises(CacheStateError, match="does not fit 20 rows"):
        twin.state = state
