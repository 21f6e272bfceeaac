"""age_tiered: which tokens are in which tier, and that a token's past does not show."""

import mlx.core as mx
import pytest
from cache_lab import (
    Tokens,
    attend,
    feed,
    held_rows,
    new_cache,
    random_tokens,
    same,
    same_state,
    shape_of,
    worst,
)

from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import AgeTieredKVOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape

G = 32


def config_of(**fields) -> KVCacheConfig:
    given = {f"age_{name}": value for name, value in fields.items()}
    return KVCacheConfig(method="age_tiered", options=AgeTieredKVOptions(**given))


def cache_of(tokens: Tokens, **fields):
    return new_cache(config_of(**fields), shape_of(tokens))


def gaussian(length: int, seed: int, heads: int = 1) -> Tokens:
    plain = random_tokens(length, seed=seed, heads=heads)
    return plain._replace(keys=mx.random.normal(plain.keys.shape, key=mx.random.key(seed)))


@pytest.mark.parametrize("total", [1, 31, 32, 95, 96, 127, 128, 129, 300])
def test_a_block_passes_when_its_youngest_token_is_old_enough(total: int) -> None:
    tokens = gaussian(total, 1)
    cache = cache_of(tokens, recent_boundary=64, mid_boundary=100)
    feed(cache, tokens, 50)
    cache.commit()
    coded = total // G * G
    old, demoted = max(0, total - 100) // G * G, max(0, total - 64) // G * G
    assert [s.length for s in cache.streams()[0]] == [
        old, demoted - old, coded - demoted, total - coded,
    ]  # fmt: skip
    assert (cache.tokens_old, cache.tokens_mid) == (old, demoted - old)
    assert cache.tokens_recent + demoted == cache.tokens_seen == cache.tokens_kept == total
    for rows, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert same(rows[:, :, coded:], true[:, :, coded:])


@pytest.mark.parametrize("widths", [(8, 4, 2), (6, 3, 2), (8, 5, 3), (1, 1, 1)])
def test_demoted_codes_are_those_of_coding_at_once(widths: tuple[int, int, int]) -> None:
    tokens = gaussian(400, 2)
    recent, mid, old = widths
    fields = {
        "recent_boundary": 64, "mid_boundary": 160,
        "bits_recent": recent, "bits_mid": mid, "bits_old": old,
    }  # fmt: skip
    whole = cache_of(tokens, **fields)
    feed(whole, tokens)
    for size in (1, 3, 64):
        pieces = cache_of(tokens, **fields)
        feed(pieces, tokens, size)
        same_state(pieces, whole)


def test_error_of_each_tier_and_none_from_age() -> None:
    tokens = gaussian(4 * 512, 3, heads=2)
    cache = cache_of(tokens, recent_boundary=512, mid_boundary=1024)
    feed(cache, tokens, 512)
    cache.commit()
    for rows, true in zip(held_rows(cache), tokens[1:], strict=True):
        lost = mx.square(rows - true).mean(axis=(0, 1, 3)).reshape(4, 512).mean(axis=1).tolist()
        assert lost[3] == pytest.approx(2e-5, rel=0.2)
        assert lost[2] == pytest.approx(0.0061, rel=0.04)
        assert lost[0] == pytest.approx(0.154, rel=0.04)
        assert lost[0] == pytest.approx(lost[1], rel=0.04)


def test_extremes_of_a_group_survive_every_tier() -> None:
    tokens = gaussian(320, 4)
    cache = cache_of(tokens, recent_boundary=32, mid_boundary=64)
    feed(cache, tokens)
    cache.commit()
    keys, values = held_rows(cache)
    for rows, true, axis in ((keys, tokens.keys, 3), (values, tokens.values, 4)):
        shape = (1, 1, 10, 32, 64) if axis == 3 else (1, 1, 320, 2, 32)
        now, then = rows.reshape(shape), true.reshape(shape)
        assert worst(now.min(axis=axis), then.min(axis=axis)) < 1e-5
        assert worst(now.max(axis=axis), then.max(axis=axis)) < 1e-5


def test_bytes_at_the_documented_defaults() -> None:
    narrow = LayerShape(1, 1, 128, 128)
    assert held(config_of(), narrow, 4096).nbytes == 475_136
    assert held(config_of(), narrow, 512).nbytes == 98_304
    per_token = [held(config_of(), narrow, n).nbytes / n for n in range(1_024, 8_193, 1_024)]
    assert per_token == sorted(per_token, reverse=True)


def test_one_width_is_uniform_and_a_wide_boundary_is_its_own() -> None:
    tokens = gaussian(256, 5)
    eight = cache_of(tokens, recent_boundary=512)
    feed(eight, tokens)
    eight.commit()
    assert eight.tokens_mid == eight.tokens_old == 0
    flat = cache_of(
        tokens, recent_boundary=32, mid_boundary=64, bits_recent=4, bits_mid=4, bits_old=4
    )
    once = cache_of(tokens, recent_boundary=512, bits_recent=4)
    for cache in (flat, once):
        feed(cache, tokens)
    for a, b in zip(held_rows(flat), held_rows(once), strict=True):
        assert same(a, b)


@pytest.mark.parametrize("total", [127, 128, 129, 257, 290])
def test_attention_reads_every_tier(total: int) -> None:
    tokens = random_tokens(total, seed=6, heads=2)
    cache = cache_of(tokens, recent_boundary=128, mid_boundary=256)
    feed(cache, tokens.cut(0, total - 1), 64)
    now = tokens.cut(total - 1, total)
    out = attend(cache, now)
    keys, values = held_rows(cache)
    wanted = mx.fast.scaled_dot_product_attention(now.queries, keys, values, scale=64**-0.5)
    assert worst(out, wanted) < 1e-4


@pytest.mark.parametrize("n", [1, 33, 150, 299, 300])
def test_rewound_tokens_keep_their_values_on_their_old_grid(n: int) -> None:
    tokens = gaussian(300, 7)
    cache = cache_of(tokens, recent_boundary=64, mid_boundary=128)
    feed(cache, tokens)
    cache.commit()
    before = held_rows(cache)
    assert cache.trim(n) == n
    for now, then in zip(held_rows(cache), before, strict=True):
        assert now.shape[2] == 300 - n
        assert n == 300 or worst(now, then[:, :, : 300 - n]) < 1e-5
    fresh = cache_of(tokens, recent_boundary=64, mid_boundary=128)
    if n < 300:
        feed(fresh, tokens.cut(0, 300 - n))
    fresh.commit()
    assert [s.length for s in cache.layout()] == [s.length for s in fresh.layout()]
    assert cache.nbytes == fresh.nbytes


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"mid_boundary": 128}, "age_mid_boundary"),
        ({"bits_old": 1}, "age_bits_old=1"),
        ({"bits_mid": 1, "bits_old": 1}, "age_bits_mid=1"),
        ({"bits_mid": 2, "bits_old": 4}, "age_bits_old"),
        ({"bits_recent": 7}, "age_bits_recent"),
        ({"group_size": 48}, "age_group_size"),
    ],
)
def test_settings_that_contradict_are_refused(fields: dict[str, int], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=field):
        cache_of(gaussian(1, 8), **fields)
