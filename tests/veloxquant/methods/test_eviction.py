"""snapkv and streaming_llm: which rows stay, at which positions, and what queries see."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cache_lab import (
    Tokens,
    attend,
    feed,
    held_rows,
    new_cache,
    random_tokens,
    same,
    shape_of,
    worst,
)

from veloxquant.cache.builder import build_layer
from veloxquant.cache.context import LayerContext
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import SnapKVOptions, StreamingLLMOptions

SNAP = KVCacheConfig(
    method="snapkv", options=SnapKVOptions(snap_budget=32, snap_obs_window=8, snap_n_sink=4)
)


def compressed(tokens: Tokens, size: int | None = None, *, views: bool = True):
    """A snapkv cache that has read a prompt and its last token."""
    cache = new_cache(SNAP, shape_of(tokens), views=views)
    feed(cache, tokens.cut(0, tokens.length - 1), size)
    attend(cache, tokens.cut(tokens.length - 1, tokens.length))
    cache.commit()
    return cache


def test_kept_rows_are_copies_with_ascending_positions() -> None:
    tokens = random_tokens(100, seed=1, batch=2)
    cache = compressed(tokens, 40)
    places = np.array(cache.kept_positions())
    assert places.shape == (2, 2, 32)
    assert (np.diff(places, axis=-1) > 0).all()
    assert (places[..., :4] == np.arange(4)).all()
    assert (places[..., -8:] == np.arange(92, 100)).all()
    for rows, true in zip(held_rows(cache), tokens[1:], strict=True):
        picked = np.take_along_axis(np.array(true), places[..., None], axis=2)
        assert np.array_equal(np.array(rows), picked)
    assert cache.fidelity == "exact"
    assert cache.tokens_total == 100
    assert cache.tokens_kept == 32
    assert cache.eviction_ratio == pytest.approx(0.68)


@pytest.mark.parametrize("place", [20, 50, 80])
def test_a_needle_and_its_neighbours_are_kept(place: int) -> None:
    tokens = random_tokens(100, seed=2, heads=1, repeat=1)
    mean = tokens.queries[:, :, -8:].mean(axis=2)
    keys = mx.array(tokens.keys)
    keys[:, :, place] = 40 * mean
    cache = compressed(tokens._replace(keys=keys))
    assert {place - 2, place - 1, place, place + 1, place + 2} <= set(
        cache.kept_positions().reshape(-1).tolist()
    )


def test_values_do_not_matter_and_queries_do() -> None:
    tokens = random_tokens(100, seed=3)
    places = compressed(tokens).kept_positions()
    louder = tokens._replace(values=100 * tokens.values)
    assert same(compressed(louder).kept_positions(), places)
    other = tokens._replace(queries=-tokens.queries)
    assert not same(compressed(other).kept_positions(), places)


def test_under_the_budget_it_is_the_plain_cache() -> None:
    tokens = random_tokens(32, seed=4)
    cache, plain = compressed(tokens), new_cache(KVCacheConfig(method="fp16"), shape_of(tokens))
    feed(plain, tokens)
    assert cache.evicted == 0
    more = random_tokens(10, seed=5)
    assert same(feed(cache, more, 1), feed(plain, more, 1))


def test_decoding_appends_and_only_that_is_rewound() -> None:
    tokens, more = random_tokens(100, seed=6), random_tokens(5, seed=7)
    cache = compressed(tokens)
    kept = held_rows(cache)[0]
    feed(cache, more, 1)
    assert cache.size() == 37
    assert cache.offset == 105
    assert not cache.is_trimmable()
    assert cache.trim(6) == 0
    assert cache.trim(5) == 5
    assert cache.offset == 100
    assert same(held_rows(cache)[0], kept)


def test_a_second_turn_is_compressed_again() -> None:
    tokens, turn = random_tokens(100, seed=8), random_tokens(30, seed=9)
    cache = compressed(tokens)
    feed(cache, turn.cut(0, 29))
    assert cache.size() == 61
    attend(cache, turn.cut(29, 30))
    cache.commit()
    assert cache.size() == 32
    assert cache.kept_positions()[..., -8:].tolist() == [[list(range(122, 130))] * 2]


def test_without_queries_it_says_so() -> None:
    cache = compressed(random_tokens(100, seed=10), views=False)
    assert cache.fidelity == "proxy"
    assert cache.size() == 32


# ---- streaming_llm --------------------------------------------------------------------------

SINKS, WINDOW = 4, 28
STREAM = KVCacheConfig(
    method="streaming_llm",
    options=StreamingLLMOptions(stream_n_sink=SINKS, stream_window_size=WINDOW),
)


def streaming(tokens: Tokens, rope=None, form: str = "exact"):
    config = STREAM.with_fields(eviction_storage=form)
    cache = build_layer(config, shape_of(tokens), LayerContext(rope=rope, views=True))
    cache.returns = "views"
    return cache


@pytest.mark.parametrize("size", [1, 2, 7, 31, 33, 100])
def test_sinks_and_window_after_every_step(size: int) -> None:
    tokens = random_tokens(100, seed=11)
    cache = streaming(tokens)
    for start in range(0, 100, size):
        stop = min(start + size, 100)
        attend(cache, tokens.cut(start, stop))
        if size == 1:
            assert cache.size() == min(stop, SINKS + WINDOW)
        cache.commit()
        assert cache.size() == min(stop, SINKS + WINDOW)
        assert cache.offset == cache.tokens_seen == stop
        first = max(SINKS, stop - WINDOW)
        for rows, true in zip(held_rows(cache), tokens[1:], strict=True):
            assert same(rows[:, :, :SINKS], true[:, :, : min(SINKS, stop)])
            assert same(rows[:, :, SINKS:], true[:, :, first:stop])


def test_a_token_after_a_chunk_sees_the_budget_and_no_more() -> None:
    tokens = random_tokens(101, seed=12)
    cache = streaming(tokens)
    feed(cache, tokens.cut(0, 100), 50)
    keys, _ = cache.update_and_fetch(tokens.keys[:, :, 100:], tokens.values[:, :, 100:])
    assert keys.shape[2] == SINKS + WINDOW


def test_memory_of_an_endless_stream_is_bounded() -> None:
    tokens = random_tokens(200, seed=13, heads=1)
    cache, most = streaming(tokens), 0
    for i in range(200):
        attend(cache, tokens.cut(i, i + 1))
        most = max(most, cache.nbytes)
    assert most <= shape_of(tokens).full_bytes(SINKS + WINDOW + 64)


def test_forgotten_values_matter_to_nobody() -> None:
    tokens, more = random_tokens(100, seed=14), random_tokens(6, seed=15)
    values = mx.array(tokens.values)
    values[:, :, SINKS:60] = 99.0
    outs = []
    for one in (tokens, tokens._replace(values=values)):
        cache = streaming(one)
        feed(cache, one, 50)
        outs.append(feed(cache, more, 1))
    assert same(outs[0], outs[1])


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [64, 32])
def test_turned_sinks_are_positions_inside_the_cache(traditional: bool, dims: int) -> None:
    """Rotating sink keys by the evicted tokens equals rotating raw keys by their slot."""
    rope = nn.RoPE(dims, traditional=traditional)
    raw = random_tokens(100, seed=16, heads=1, repeat=1)
    rotated = Tokens(rope(raw.queries), rope(raw.keys), raw.values)
    cache = streaming(rotated, rope)
    feed(cache, rotated.cut(0, 60), 60)
    outs = feed(cache, rotated.cut(60, 100), 1)
    slots = [*range(SINKS), *range(100 - WINDOW, 100)]
    index = mx.array(slots)
    keys = rope(mx.take(raw.keys, index, axis=2))
    query = rope(raw.queries[:, :, 99:], offset=SINKS + WINDOW - 1)
    wanted = mx.fast.scaled_dot_product_attention(
        query, keys, mx.take(raw.values, index, axis=2), scale=64**-0.5
    )
    assert worst(outs[:, :, -1:], wanted) < 1e-4
    still = held_rows(cache)[0]
    assert same(still[:, :, SINKS:], mx.take(rotated.keys, index[SINKS:], axis=2))
    assert worst(still[:, :, :SINKS], rope(raw.keys[:, :, :SINKS], offset=68)) < 1e-4


@pytest.mark.parametrize("size", [1, 3, 40])
def test_sinks_beside_a_packed_window_are_exact_and_turned(size: int) -> None:
    rope, raw = nn.RoPE(64), random_tokens(100, seed=17, heads=1, repeat=1)
    rotated = Tokens(rope(raw.queries), rope(raw.keys), raw.values)
    cache = streaming(rotated, rope, "affine4")
    feed(cache, rotated.cut(0, SINKS + 2), size)
    cache.commit()
    assert cache.sink_keys.length == SINKS
    assert cache.trim(3) == 3
    feed(cache, rotated.cut(SINKS - 1, 100), size)
    cache.commit()
    assert cache.size() == SINKS + WINDOW
    keys, values = held_rows(cache)
    assert same(values[:, :, :SINKS], raw.values[:, :, :SINKS])
    assert worst(keys[:, :, :SINKS], rope(raw.keys[:, :, :SINKS], offset=68)) < 1e-4
    assert 0 < worst(values[:, :, SINKS:], raw.values[:, :, -WINDOW:]) < 0.3
