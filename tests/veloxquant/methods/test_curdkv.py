"""curdkv: leverages are what linear algebra says, and choose the rows that span the others."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cache_lab import Tokens, attend, feed, held_rows, new_cache, random_tokens, same, shape_of

from veloxquant.cache.builder import build_layer
from veloxquant.cache.context import LayerContext
from veloxquant.cache.leverage import leverage, leverage_basis
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import CurDKVOptions
from veloxquant.core.exceptions import QuantizerConfigError


def config(**fields) -> KVCacheConfig:
    return KVCacheConfig(method="curdkv", options=CurDKVOptions(**{"curdkv_budget": 32, **fields}))


def compressed(tokens: Tokens, size: int | None = None, rope=None, **fields):
    """A cache that has read a prompt and its last token."""
    context = LayerContext(rope=rope, views=True)
    cache = build_layer(config(**fields), shape_of(tokens), context)
    feed(cache, tokens.cut(0, tokens.length - 1), size)
    attend(cache, tokens.cut(tokens.length - 1, tokens.length))
    cache.commit()
    return cache


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def of(x: mx.array, rank: int) -> np.ndarray:
    return np.array(leverage(x, leverage_basis(x, rank)))


def truth(x: mx.array, rank: int) -> np.ndarray:
    u = np.linalg.svd(np.array(x, dtype=np.float64), full_matrices=False)[0]
    return (u[..., :rank] ** 2).sum(-1)


@pytest.mark.parametrize("rank", [1, 5, 24])
@pytest.mark.parametrize("factor", [1.0, 3e4, 1e-15])
def test_leverages_are_those_of_the_singular_vectors(rank: int, factor: float) -> None:
    x = factor * normal(2, 60, 24) * mx.arange(1, 25)
    found = of(x, rank)
    assert found == pytest.approx(truth(x, rank), abs=1e-3)
    assert found.sum(-1) == pytest.approx(rank, abs=1e-3)
    assert found.min() >= 0
    assert found.max() <= 1 + 1e-5


def test_full_leverages_do_not_change_with_the_basis_and_norms_do() -> None:
    x, turn = normal(50, 8), normal(8, 8, seed=1) + 3 * mx.eye(8)
    assert of(x @ turn, 8) == pytest.approx(of(x, 8), abs=1e-3)
    norms = [np.array(mx.square(a).sum(-1)) for a in (x, x @ turn)]
    assert np.abs(norms[0] / norms[0].sum() - norms[1] / norms[1].sum()).max() > 1e-3


def test_directions_without_energy_give_nothing() -> None:
    assert not of(mx.zeros((1, 10, 8)), 4).any()
    thin = normal(40, 2) @ normal(2, 8, seed=1)
    assert of(thin, 8).sum() == pytest.approx(2, abs=1e-2)


def test_copies_share_their_leverage() -> None:
    x = normal(40, 8)
    single = of(x, 8)[0]
    thrice = of(mx.concatenate([x, x[:1], x[:1]]), 8)
    assert thrice[0] == pytest.approx(thrice[-1], abs=1e-4)
    assert thrice[0] < single


def test_a_row_beside_all_others_stays() -> None:
    tokens = random_tokens(100, seed=1, heads=1)
    keys, values = mx.array(tokens.keys), mx.array(tokens.values)
    for x in (keys, values):
        x[..., 5] = 0
        x[:, :, 50] = 0
        x[:, :, 50, 5] = 30.0
    cache = compressed(tokens._replace(keys=keys, values=values), curdkv_rank_cap=64)
    assert 50 in cache.kept_positions().reshape(-1).tolist()


def test_of_two_alike_keys_the_one_without_a_value_goes() -> None:
    tokens = random_tokens(100, seed=2, heads=1)
    values = mx.array(tokens.values)
    values[:, :, 40] = 0
    cache = compressed(tokens._replace(values=values))
    assert cache.size() == 32
    assert 40 not in cache.kept_positions().reshape(-1).tolist()


def test_sinks_and_the_newest_stay_bit_exact_however_the_prompt_was_cut() -> None:
    tokens = random_tokens(100, seed=3)
    cache, other = compressed(tokens), compressed(tokens, 23)
    assert same(cache.kept_positions(), other.kept_positions())
    for rows, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert same(rows[:, :, :4], true[:, :, :4])
        assert same(rows[:, :, -16:], true[:, :, -16:])


def test_decoding_holds_the_budget_with_the_directions_of_the_prompt() -> None:
    cache, more = compressed(random_tokens(100, seed=4)), random_tokens(40, seed=5)
    bases = cache.scorer.bases
    for i in range(40):
        attend(cache, more.cut(i, i + 1))
        assert cache.size() == 32
    assert all(same(a, b) for a, b in zip(bases, cache.scorer.bases, strict=True))
    assert cache.kept_positions()[0, 0, -16:].tolist() == list(range(124, 140))
    assert cache.columns["leverage"].shape == (1, 2, 32)
    feed(cache, random_tokens(30, seed=6))
    assert cache.scorer.bases is None
    feed(cache, random_tokens(2, seed=7), 1)
    assert cache.size() == 32
    assert not same(bases[1], cache.scorer.bases[1])


@pytest.mark.parametrize("traditional", [False, True])
def test_scores_do_not_see_positions(traditional: bool) -> None:
    rope = nn.RoPE(64, traditional=traditional)
    raw = random_tokens(100, seed=8)
    kept = []
    for shift in (0, 1000):
        tokens = raw._replace(keys=rope(raw.keys, offset=shift))

        cache = build_layer(config(), shape_of(raw), LayerContext(rope=rope, views=True))
        feed(cache, tokens)
        kept.append(np.array(cache.scorer.score(cache)))
    assert kept[1] == pytest.approx(kept[0], rel=2e-2, abs=1e-4)


def test_the_kept_values_span_more_than_chosen_at_random() -> None:
    rng = np.random.default_rng(0)
    better = 0
    for _ in range(20):
        x = rng.normal(size=(200, 6)) * rng.pareto(1.5, size=(200, 1)) @ rng.normal(size=(6, 32))
        x = x + 0.05 * rng.normal(size=x.shape)
        best = np.argsort(-of(mx.array(x.astype(np.float32)), 6))[:20]
        errors = []
        for rows in (best, rng.permutation(200)[:20]):
            top = np.linalg.svd(x[rows], full_matrices=False)[2][:6]
            errors.append(np.linalg.norm(x - x @ top.T @ top))
        better += errors[0] <= errors[1]
    assert better >= 19


def test_a_rank_over_the_channels_is_refused() -> None:
    with pytest.raises(QuantizerConfigError, match="curdkv_rank_cap=65"):
        new_cache(config(curdkv_rank_cap=65), shape_of(random_tokens(1)))
