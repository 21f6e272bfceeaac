"""squeeze: budgets that all layers of a sequence make together, then sinks and newest rows."""

import copy

import mlx.core as mx
import pytest
from cache_lab import Tokens, attend, feed, held_rows, random_tokens, same, shape_of, state_parts

from veloxquant.allocators.layer_budgets import class_budgets
from veloxquant.cache.attention_rows import attention_rows
from veloxquant.cache.builder import build_layer
from veloxquant.cache.context import LayerContext
from veloxquant.cache.coordinators import groups_for
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import SqueezeAttentionOptions
from veloxquant.methods.squeeze import layer_groups

MEAN, SINKS, LAYERS = 40, 4, 4
CONFIG = KVCacheConfig(method="squeeze", options=SqueezeAttentionOptions(squeeze_budget=MEAN))
SHARPNESS = (0.1, 2.0, 0.2, 6.0)


def layer_tokens(length: int, seed: int = 0, sharpness=SHARPNESS) -> list[Tokens]:
    """Layers whose queries are more or less picky."""
    out = [random_tokens(length, seed=seed + i) for i in range(LAYERS)]
    return [t._replace(queries=f * t.queries) for t, f in zip(out, sharpness, strict=True)]


def model_layers(shape, config=CONFIG, *, views: bool = True) -> list:
    groups = groups_for(lambda n: layer_groups(config, n), [shape] * LAYERS, [None] * LAYERS)
    return [
        build_layer(config, shape, LayerContext(i, LAYERS, views=views, group=groups[i]))
        for i in range(LAYERS)
    ]


def step(caches: list, tokens: list[Tokens], start: int, stop: int) -> None:
    """One forward pass: layer after layer."""
    for cache, own in zip(caches, tokens, strict=True):
        mx.eval(attend(cache, own.cut(start, stop)))


def read(caches: list, tokens: list[Tokens], cuts: tuple[int, ...]) -> list:
    """Passes that end at `cuts`."""
    for start, stop in zip((0, *cuts), cuts, strict=False):
        step(caches, tokens, start, stop)
    for cache in caches:
        cache.commit()
    return caches


@pytest.mark.parametrize("cuts", [(99, 100), (20, 41, 99, 100)])
def test_layers_share_the_rows_by_concentration(cuts: tuple[int, ...]) -> None:
    tokens = layer_tokens(100)
    caches = read(model_layers(shape_of(tokens[0])), tokens, cuts)
    said = [c.concentration for c in caches]
    assert sorted(range(LAYERS), key=said.__getitem__) == [0, 2, 1, 3]
    budgets = class_budgets(said, MEAN, SINKS + 8)
    assert [c.layer_budget for c in caches] == [c.size() for c in caches] == budgets
    assert sum(budgets) == LAYERS * MEAN
    assert budgets[3] == min(budgets) == 12
    for cache, own in zip(caches, tokens, strict=True):
        newest = own.keys[:, :, 100 - cache.size() + SINKS :]
        assert same(held_rows(cache)[0][:, :, :SINKS], own.keys[:, :, :SINKS])
        assert same(held_rows(cache)[0][:, :, SINKS:], newest)
        assert cache.fidelity == "proxy"
        assert not cache.board.notes


def test_concentration_is_one_minus_the_relative_entropy() -> None:
    tokens = layer_tokens(80, seed=30)
    caches = read(model_layers(shape_of(tokens[0])), tokens, (79, 80))
    for cache, own in zip(caches, tokens, strict=True):
        weights = attention_rows(own.queries[:, :, -32:], own.keys, 64**-0.5, 48).mean(axis=(2, 3))
        entropy = -(weights * mx.log(mx.maximum(weights, 1e-30))).sum(axis=-1)
        wanted = (1 - entropy / mx.log(mx.array(80.0))).mean().item()
        assert cache.concentration == pytest.approx(wanted, abs=1e-4)


def test_budgets_hold_at_all_later_times() -> None:
    tokens, more = layer_tokens(100), layer_tokens(40, seed=50)
    caches = read(model_layers(shape_of(tokens[0])), tokens, (99, 100))
    budgets = [c.layer_budget for c in caches]
    for cuts in [(1, 2, 3), (20, 40)]:
        read(caches, more, cuts)
        assert [c.size() for c in caches] == [c.layer_budget for c in caches] == budgets
    for cache, own in zip(caches, more, strict=True):
        assert same(held_rows(cache)[0][:, :, -1], own.keys[:, :, -1])


def test_a_short_prompt_waits_and_loses_nothing() -> None:
    tokens = layer_tokens(60)
    caches = read(model_layers(shape_of(tokens[0])), tokens, (9, 10, 11, 12))
    assert not any(c.is_resolved for c in caches)
    assert [c.size() for c in caches] == [12] * LAYERS
    assert caches[0].trim(2) == 2
    for cache in caches[1:]:
        cache.trim(2)
    for start in range(10, 60):
        step(caches, tokens, start, start + 1)
    for cache in caches:
        cache.commit()
    assert all(c.is_resolved for c in caches)
    assert sum(c.layer_budget for c in caches) == LAYERS * MEAN


def test_every_sequence_has_classes_of_its_own() -> None:
    first, second = layer_tokens(100), layer_tokens(100, seed=60, sharpness=SHARPNESS[::-1])
    shape = shape_of(first[0])
    caches = model_layers(shape)
    step(caches, first, 0, 50)
    twins = copy.deepcopy(caches)
    read(caches, [t.cut(50, 100) for t in first], (49, 50))
    read(twins, [t.cut(50, 100) for t in second], (49, 50))
    assert caches[3].layer_budget < MEAN < caches[0].layer_budget
    assert twins[0].layer_budget < MEAN < twins[3].layer_budget


def test_layers_that_are_alone_or_unseen_have_the_mean() -> None:
    tokens = layer_tokens(100)
    caches = model_layers(shape_of(tokens[0]))
    step(caches, tokens, 0, 99)
    single = copy.deepcopy(caches[3])
    mx.eval(attend(single, tokens[3].cut(99, 100)))
    single.commit()
    assert single.layer_budget == single.size() == MEAN
    even = [tokens[0]] * LAYERS
    assert [c.size() for c in read(model_layers(shape_of(even[0])), even, (99, 100))] == [MEAN] * 4


def test_without_queries_keys_decide() -> None:
    tokens = layer_tokens(100)
    tokens[2] = tokens[2]._replace(keys=tokens[2].keys + 4.0)
    tokens[1] = tokens[1]._replace(keys=tokens[1].keys + 1.5)
    caches = model_layers(shape_of(tokens[0]), views=False)
    read(caches, tokens, (99, 100))
    budgets = [c.layer_budget for c in caches]
    assert sum(budgets) == LAYERS * MEAN
    assert budgets[2] == min(budgets) < MEAN


def test_a_resolved_budget_holds_from_the_start() -> None:
    options = SqueezeAttentionOptions(squeeze_budget=MEAN, squeeze_resolved_budget=20)
    config = KVCacheConfig(method="squeeze", options=options)
    tokens = random_tokens(70, seed=70)
    cache = build_layer(config, shape_of(tokens), LayerContext(views=True))
    feed(cache, tokens, 30)
    cache.commit()
    assert (cache.size(), cache.layer_budget) == (20, 20)


def test_a_state_brings_its_budget() -> None:
    tokens = layer_tokens(100)
    caches = read(model_layers(shape_of(tokens[0])), tokens, (99, 100))
    twins = model_layers(shape_of(tokens[0]))
    for twin, cache in zip(twins, caches, strict=True):
        twin.state = cache.state
        assert twin.is_resolved
        assert twin.layer_budget == cache.layer_budget
        assert state_parts(twin)[0] == state_parts(cache)[0]
