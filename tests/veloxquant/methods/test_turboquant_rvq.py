"""turboquant_rvq: bytes by width, exact rewinding, products without bias."""

import mlx.core as mx
import pytest
from cache_lab import feed, held_rows, new_cache, random_tokens, same_state, shape_of

from veloxquant.cache.builder import build_layer
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6])
def test_bytes_are_codes_and_norms(bits: int) -> None:
    tokens = random_tokens(256, seed=1, k_dim=128, dtype=mx.bfloat16)
    config = KVCacheConfig(method="turboquant_rvq", bit_width_inlier=bits)
    cache = new_cache(config, shape_of(tokens))
    cache.update_and_fetch(tokens.keys, tokens.values)
    cache.commit()
    assert cache.nbytes == 2 * 256 * 2 * (bits * 128 // 8 + 2)
    assert cache.assigned_bits == bits
    assert cache.compressed_key_bytes == cache.compressed_value_bytes == cache.nbytes // 2
    assert cache.assigned_avg_bits == pytest.approx(bits + 16 / 128)


def test_error_falls_with_width() -> None:
    tokens = random_tokens(200, seed=2)
    lost = []
    for bits in range(1, 7):
        config = KVCacheConfig(method="turboquant_rvq", bit_width_inlier=bits)
        cache = new_cache(config, shape_of(tokens))
        feed(cache, tokens)
        cache.commit()
        keys, values = held_rows(cache)
        lost.append(mx.square(values - tokens.values).mean().item())
        assert mx.square(keys - tokens.keys).mean().item() < 2 * 5 * lost[-1]
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > 100 * lost[-1]


@pytest.mark.parametrize("n", [1, 40, 129])
def test_trim_and_append_again(n: int) -> None:
    tokens = random_tokens(300, seed=3)
    cache, straight = (
        new_cache(KVCacheConfig(method="turboquant_rvq"), shape_of(tokens)) for _ in range(2)
    )
    feed(cache, tokens)
    feed(straight, tokens, 7)
    assert cache.trim(n) == n
    feed(cache, tokens.cut(300 - n, 300), 1)
    same_state(cache, straight)


def test_the_seed_is_part_of_the_code() -> None:
    tokens = random_tokens(30, seed=4)
    coded = []
    for seed in (1, 1, 2):
        cache = new_cache(KVCacheConfig(method="turboquant_rvq", seed=seed), shape_of(tokens))
        feed(cache, tokens)
        cache.commit()
        coded.append(held_rows(cache)[0])
    assert mx.array_equal(coded[0], coded[1]).item()
    assert not mx.array_equal(coded[0], coded[2]).item()


def test_it_is_the_default() -> None:
    cache = build_layer(KVCacheConfig(), LayerShape(1, 1, 128, 128))
    assert cache.method == "turboquant_rvq"
