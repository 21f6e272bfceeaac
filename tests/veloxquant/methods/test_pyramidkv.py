"""pyramidkv: budgets by layer, and in each layer what snapkv keeps."""

import mlx.core as mx
import pytest
from cache_lab import Tokens, attend, feed, held_rows, random_tokens, same, shape_of

from veloxquant.cache.builder import build_layer
from veloxquant.cache.context import LayerContext
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import PyramidKVOptions, SnapKVOptions

MEAN, LAYERS = 48, 3
CONFIG = KVCacheConfig(method="pyramidkv", options=PyramidKVOptions(pyramid_budget=MEAN))


def compressed(tokens: Tokens, layer: int, size: int | None = None):
    """The cache of one of three layers after a prompt and its last token."""
    cache = build_layer(CONFIG, shape_of(tokens), LayerContext(layer, LAYERS, views=True))
    feed(cache, tokens.cut(0, tokens.length - 1), size)
    attend(cache, tokens.cut(tokens.length - 1, tokens.length))
    cache.commit()
    return cache


def test_layers_hold_what_snapkv_holds_with_their_budget() -> None:
    tokens = random_tokens(90, seed=1, dtype=mx.bfloat16)
    sizes = []
    for layer in range(LAYERS):
        cache = compressed(tokens, layer, 40)
        options = SnapKVOptions(snap_budget=cache.layer_budget, snap_obs_window=32, snap_n_sink=4)
        snap = build_layer(
            KVCacheConfig(method="snapkv", options=options), shape_of(tokens),
            LayerContext(views=True),
        )  # fmt: skip
        feed(snap, tokens.cut(0, 89))
        attend(snap, tokens.cut(89, 90))
        snap.commit()
        assert same(cache.kept_positions(), snap.kept_positions())
        assert same(held_rows(cache)[0], held_rows(snap)[0])
        assert cache.pyramid_kept_bytes == shape_of(tokens).full_bytes(cache.layer_budget)
        sizes.append(cache.size())
    assert sizes == [56, 48, 40]
    assert sum(sizes) == LAYERS * MEAN


@pytest.mark.parametrize(("length", "kept"), [(40, [40, 40, 40]), (50, [50, 48, 40])])
def test_short_prompts_lose_rows_in_the_last_layers_only(length: int, kept: list[int]) -> None:
    tokens = random_tokens(length, seed=2)
    assert [compressed(tokens, layer).size() for layer in range(LAYERS)] == kept


def test_a_resolved_budget_is_that_of_the_layer() -> None:
    tokens = random_tokens(60, seed=3)
    options = PyramidKVOptions(pyramid_budget=MEAN, pyramid_resolved_budget=37)
    config = KVCacheConfig(method="pyramidkv", options=options)
    cache = build_layer(config, shape_of(tokens), LayerContext(2, LAYERS, views=True))
    assert cache.layer_budget == 37


def test_a_layer_by_itself_has_the_mean() -> None:
    assert build_layer(CONFIG, shape_of(random_tokens(1))).layer_budget == MEAN


def test_a_state_brings_its_budget() -> None:
    tokens, last = random_tokens(90, seed=4), random_tokens(2, seed=5)
    first = build_layer(CONFIG, shape_of(tokens), LayerContext(0, LAYERS, views=True))
    feed(first, tokens)
    other = build_layer(CONFIG, shape_of(tokens), LayerContext(2, LAYERS, views=True))
    other.state = first.state
    assert same(feed(other, last, 1), feed(first, last, 1))
    assert other.layer_budget == 56
