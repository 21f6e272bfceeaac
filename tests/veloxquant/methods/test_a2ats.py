"""a2ats: what is exact, what is retrieved, and that retrieval reads the right tokens."""

import math

import mlx.core as mx
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

from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import A2ATSOptions
from veloxquant.core.exceptions import CodebookDimensionMismatch, QuantizerConfigError
from veloxquant.methods import a2ats
from veloxquant.quantizers.a2ats_rope import a2ats_apply_exact_rope
from veloxquant.quantizers.bit_stream import unpack_codes

SMALL = {"a2ats_codebook_bits": 4, "a2ats_window": 16, "a2ats_b": 64}


def cache_of(tokens, **options):
    config = KVCacheConfig(method="a2ats", options=A2ATSOptions(**(SMALL | options)))
    return new_cache(config, shape_of(tokens))


def placed(tokens: Tokens) -> Tokens:
    """Queries and keys with their positions on, as a model gives them."""
    at = mx.arange(tokens.length)
    return tokens._replace(
        queries=a2ats_apply_exact_rope(tokens.queries, at),
        keys=a2ats_apply_exact_rope(tokens.keys, at),
    )


def test_sinks_and_window_are_the_input() -> None:
    tokens = random_tokens(150, seed=1)
    cache = cache_of(tokens)
    feed(cache, tokens, 40)
    cache.commit()
    for got, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert same(got[:, :, :4], true[:, :, :4])
        assert same(got[:, :, -16:], true[:, :, -16:])
        assert 1e-3 < worst(got, true) < 1.5


def test_a_window_over_everything_is_exact() -> None:
    tokens = random_tokens(100, seed=2)
    cache = cache_of(tokens, a2ats_window=200, a2ats_b=200)
    got = feed(cache, tokens, 30)[:, :, -1:]
    keys, values = (mx.repeat(a, 2, axis=1) for a in tokens[1:])
    want = mx.fast.scaled_dot_product_attention(
        tokens.queries[:, :, -1:], keys, values, scale=0.125
    )
    assert worst(got, want) < 1e-5
    assert cache.codes.length == 0


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5])
def test_a_single_query_reads_sinks_window_and_the_retrieved(fraction: float) -> None:
    tokens = placed(random_tokens(201, seed=3, heads=2, repeat=2))
    cache = cache_of(tokens, a2ats_retrieval_fraction=fraction)
    feed(cache, tokens.cut(0, 200), 50)
    now = tokens.cut(200, 201)
    got = attend(cache, now)
    far = cache.keys_stream.body.length
    assert cache.tokens_retrieved == math.ceil(fraction * far)
    index = np.array(cache.retrieved(now.queries, 0.125))
    assert index.shape == (1, 2, cache.tokens_retrieved)
    assert (np.diff(index, axis=-1) > 0).all()
    keys, values = held_rows(cache)
    for head in range(2):
        rows = mx.array(np.r_[0:4, 4 + index[0, head], 4 + far : 201])
        some = [mx.repeat(a[:, head : head + 1][:, :, rows], 2, axis=1) for a in (keys, values)]
        want = mx.fast.scaled_dot_product_attention(
            now.queries[:, 2 * head : 2 * head + 2], *some, scale=0.125
        )
        assert worst(got[:, 2 * head : 2 * head + 2], want) < 1e-4


def test_everything_is_everything() -> None:
    """A share of one equals attention over all tokens; so does a step of several queries."""
    tokens = placed(random_tokens(203, seed=4))
    sparse, whole = cache_of(tokens), cache_of(tokens, a2ats_retrieval_fraction=1.0)
    for cache in (sparse, whole):
        feed(cache, tokens.cut(0, 200), 50)
    assert same(attend(sparse, tokens.cut(200, 202)), attend(whole, tokens.cut(200, 202)))
    now = tokens.cut(202, 203)
    assert worst(attend(sparse, now), attend(whole, now)) > 1e-3


def test_what_matters_is_found() -> None:
    """The far keys that a query asks for, at the distance that far tokens are given, are read."""
    plain = random_tokens(301, seed=5, heads=1, repeat=1)
    wanted = [40, 90, 160, 220]
    query = plain.queries[0, 0, 300]
    keys = plain.keys[0, 0] / 3
    for at in wanted:
        # Turned so that the product at the constant distance is that with the query itself.
        keys[at] = a2ats_apply_exact_rope(query, mx.array(64))
    tokens = placed(plain._replace(keys=keys[None, None]))
    cache = cache_of(tokens, a2ats_retrieval_fraction=0.1)
    feed(cache, tokens.cut(0, 300), 60)
    now = tokens.cut(300, 301)
    attend(cache, now)
    found = set((np.array(cache.retrieved(now.queries, 0.125))[0, 0] + 4).tolist())
    assert set(wanted) <= found


def test_codes_are_those_of_positions_taken_off() -> None:
    """The same key at two positions has one code, up to the error of its four bits."""
    plain = random_tokens(200, seed=6, heads=1)
    twice = plain._replace(keys=mx.concatenate([plain.keys[:, :, :100]] * 2, axis=2))
    cache = cache_of(placed(twice))
    feed(cache, placed(twice), 50)
    cache.commit()
    words = cache.codes.live[3]["w"][0, 0, : cache.codes.length]
    codes = np.array(unpack_codes(words, 4, 8))
    second = codes[106:]
    assert len(second) > 20
    assert (codes[6 : 6 + len(second)] == second).mean() > 0.8


def test_codes_come_with_the_codebook_and_go_with_the_tokens() -> None:
    tokens = random_tokens(150, seed=7)
    cache = cache_of(tokens)
    feed(cache, tokens.cut(0, 50))
    cache.commit()
    assert cache.codes.length == 0
    assert cache.codebook_bytes == 0
    assert cache.tokens_retrieved == cache.keys_stream.body.length
    feed(cache, tokens.cut(50, 150), 30)
    cache.commit()
    assert cache.codes.length == cache.keys_stream.body.length == 128 - 4  # behind the sinks
    assert cache.codebook_bytes == 2 * 16 * 8 * 2
    cache.trim(60)
    assert cache.codes.length == cache.keys_stream.body.length == 64 - 4
    cache.trim(50)
    assert cache.codes.length == 0
    assert cache.codebook_bytes == 0
    assert cache.tokens_seen == 40


def test_given_codebooks_and_moments_are_used() -> None:
    tokens = placed(random_tokens(600, seed=8))
    config = KVCacheConfig(method="a2ats", options=A2ATSOptions(**SMALL))
    sample = LayerSample(
        0, 1, shape_of(tokens), tokens.keys[0], tokens.values[0], tokens.queries[0], mx.arange(600)
    )
    found = a2ats.fit(sample, config)
    assert found["a2ats_query_h"].shape == (2, 64, 64)
    assert found["a2ats_codebook"].shape == (2, 8, 16, 8)
    cache = a2ats.build(config, shape_of(tokens), LayerContext(artifacts=found))
    cache.returns = "views"
    feed(cache, tokens.cut(0, 60), 20)
    cache.commit()
    assert cache.codes.length == 32 - 4  # no waiting for a codebook
    assert "book" not in cache.codes.live[3]
    assert cache.codebook_bytes == 2 * found["a2ats_codebook"].size
    plain = config.with_fields(a2ats_use_query_aware=False)
    assert a2ats.build(plain, shape_of(tokens), LayerContext(artifacts=found)).codec.basis is None
    with pytest.raises(CodebookDimensionMismatch, match="a2ats_codebook"):
        cache_of(tokens, a2ats_codebook=np.ones((16, 4)))
    with pytest.raises(CodebookDimensionMismatch, match="a2ats_query_h"):
        cache_of(tokens, a2ats_query_h=mx.eye(32))


def test_without_views_every_token_is_read() -> None:
    tokens = placed(random_tokens(201, seed=9))
    arrays, whole = cache_of(tokens), cache_of(tokens, a2ats_retrieval_fraction=1.0)
    arrays.returns = "arrays"
    for cache in (arrays, whole):
        feed(cache, tokens.cut(0, 200), 50)
    now = tokens.cut(200, 201)
    assert worst(attend(arrays, now), attend(whole, now)) < 1e-4


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"a2ats_b": 8}, "a2ats_b=8"),
        ({"a2ats_codebook_bits": 13}, "a2ats_codebook_bits=13"),
        ({"a2ats_sub_dim": 7}, "a2ats_sub_dim=7"),
        ({"a2ats_retrieval_fraction": 0.0}, "a2ats_retrieval_fraction=0.0"),
        ({"a2ats_beta": 1.5}, "a2ats_beta=1.5"),
        ({"a2ats_rope_scaling": {"type": "other", "factor": 2.0}}, "'other'"),
    ],
)
def test_what_does_not_go_together_is_refused(options, told: str) -> None:
    with pytest.raises(QuantizerConfigError, match=told):
        cache_of(random_tokens(1), **options)
