"""cachegen: chunks at fixed places, bits by depth, coded chunks that come back."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import (
    Tokens,
    attend,
    feed,
    held_rows,
    new_cache,
    plan_of,
    random_tokens,
    same,
    same_state,
    shape_of,
    worst,
)

from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.coded import cachegen_bits
from veloxquant.cache.persist import load_caches, save_caches
from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import CacheGenOptions
from veloxquant.methods.cachegen import build
from veloxquant.quantizers.delta import unpack_chunk

SINKS, CHUNK = 4, 256


def config_of(**options: Any) -> KVCacheConfig:
    return KVCacheConfig(method="cachegen", options=CacheGenOptions(**options))


def filled(tokens: Tokens, size: int = 128, **options: Any) -> Any:
    cache = new_cache(config_of(**options), shape_of(tokens))
    feed(cache, tokens, size)
    cache.commit()
    return cache


def test_a_round_length_takes_what_its_codes_take() -> None:
    """The documents say 3.88 for codes and scales alone; four sinks come on top."""
    tokens = random_tokens(4096, seed=11, heads=1, repeat=1, k_dim=128, dtype=mx.bfloat16)
    cache = filled(tokens, 512)
    held_bytes = sum(a.nbytes for side in cache.streams() for s in side for a in s.arrays())
    assert cache.nbytes == held_bytes
    assert 4096 * 2 * 256 / held_bytes >= 0.97 * 3.88


@pytest.mark.parametrize("total", [3, 4, 255, 256, 300, 511, 512])
def test_whole_chunks_are_coded_and_the_rest_is_exact(total: int) -> None:
    tokens = random_tokens(total, seed=1, heads=1)
    cache = filled(tokens)
    chunks = total // CHUNK
    body = max(0, CHUNK * chunks - SINKS)
    opening = min(body, CHUNK - SINKS)
    wanted = [min(SINKS, total), opening, body - opening, max(0, total - SINKS) - body]
    for side in cache.streams():
        assert [store.length for store in side] == wanted
    for got, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert same(got[:, :, :SINKS], true[:, :, :SINKS])
        assert same(got[:, :, SINKS + body :], true[:, :, SINKS + body :])


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 7])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_sizes_are_planned(per_channel: bool, bits: int, dtype: mx.Dtype) -> None:
    tokens = random_tokens(600, seed=2, heads=2, k_dim=80, v_dim=64, dtype=dtype)
    config = config_of(cachegen_per_channel=per_channel, cachegen_bits=bits)
    cache = new_cache(config, shape_of(tokens))
    for at in range(0, 600, 100):
        cache.update_and_fetch(*tokens.cut(at, at + 100)[1:])
        cache.commit()
        assert cache.nbytes == held(config, shape_of(tokens), at + 100).nbytes
    assert all(a.dtype == dtype for a in held_rows(cache))


@pytest.mark.parametrize("per_channel", [True, False])
def test_the_state_does_not_depend_on_the_pieces(per_channel: bool) -> None:
    tokens = random_tokens(420, seed=3)
    whole = filled(tokens, 420, cachegen_per_channel=per_channel)
    for size in (1, 150):
        same_state(whole, filled(tokens, size, cachegen_per_channel=per_channel))


@pytest.mark.parametrize("per_channel", [True, False])
def test_attention_reads_what_it_holds(per_channel: bool) -> None:
    tokens = random_tokens(400, seed=4, k_dim=80)
    cache = filled(tokens.cut(0, 399), cachegen_per_channel=per_channel)
    last = tokens.cut(399, 400)
    out = attend(cache, last)
    wanted = mx.fast.scaled_dot_product_attention(last.queries, *held_rows(cache), scale=80**-0.5)
    assert worst(out, wanted) <= 1e-4


def test_a_sink_does_not_widen_the_first_chunk() -> None:
    plain = random_tokens(260, seed=5, heads=1)
    loud = mx.where(mx.arange(260)[:, None] == 0, 200.0, plain.keys)
    cache = filled(plain._replace(keys=loud))
    keys, _ = held_rows(cache)
    assert worst(keys[:, :, SINKS:], loud[:, :, SINKS:]) < 2.5


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("use_delta", [True, False])
def test_coded_chunks_hold_the_codes(per_channel: bool, use_delta: bool) -> None:
    tokens = random_tokens(540, seed=6, heads=2)
    cache = filled(tokens, cachegen_per_channel=per_channel, cachegen_use_delta=use_delta)
    chunks = [unpack_chunk(data) for data in cache.coded_chunks()]
    lengths = [CHUNK - SINKS if per_channel else CHUNK, CHUNK] * 2
    assert [chunk.shape for chunk in chunks] == [(n, 2 * 64) for n in lengths]
    store = cache.streams()[0][1]
    codes = np.array(store.codec.codes(store.live[3]))
    codes = codes.transpose(0, 1, 3, 2) if per_channel else codes
    first = codes[0, :, : lengths[0]].transpose(1, 0, 2).reshape(lengths[0], -1)
    np.testing.assert_array_equal(chunks[0], first)


def test_savings_are_those_of_the_coded_chunks() -> None:
    tokens = random_tokens(540, seed=7, heads=2)
    slow = mx.cumsum(tokens.keys, axis=2)
    close, plain = filled(tokens._replace(keys=slow, values=slow)), filled(tokens)
    assert filled(tokens.cut(0, 100)).entropy_savings == 0.0
    assert 0 < plain.entropy_savings < 0.2 < close.entropy_savings
    fixed = 2 * (2 * CHUNK - SINKS) * 128 * 4 // 8
    really = 1 - sum(map(len, close.coded_chunks())) / fixed
    assert close.entropy_savings == pytest.approx(really, abs=0.01)


@pytest.mark.parametrize("left", [600, 512, 511, 300, 256, 255, 100, 4, 2, 0])
def test_tokens_go_back_to_the_layout_of_their_length(left: int) -> None:
    """What leaves a chunk is exact as decoded; fed again, the codes are those of these rows."""
    tokens = random_tokens(700, seed=12, heads=1)
    cache = filled(tokens, 90)
    before = held_rows(cache)
    assert cache.trim(700 - left) == 700 - left
    assert [s.length for s in cache.streams()[0]] == list(cache.plan.keys.rows(left))
    assert cache.nbytes == held(config_of(), shape_of(tokens), left).nbytes
    if left:
        for now, then in zip(held_rows(cache), before, strict=True):
            assert worst(now, then[:, :, :left]) < 1e-5
    feed(cache, tokens.cut(left, 700), 128)
    cache.commit()
    assert [s.length for s in cache.streams()[0]] == list(cache.plan.keys.rows(700))


def test_a_saved_opening_comes_back(tmp_path: Path) -> None:
    tokens = random_tokens(300, seed=13)
    cache, other = filled(tokens), new_cache(config_of(), shape_of(tokens))
    save_caches(tmp_path / "one", [cache], config_of())
    loaded = load_caches(tmp_path / "one", plan_of(shape_of(tokens), 1), config_of())
    same_state(cache, loaded[0])
    other.state = cache.state
    for fed in (cache, loaded[0], other):
        feed(fed, random_tokens(300, seed=14), 77)
        fed.commit()
    same_state(cache, loaded[0])
    same_state(cache, other)


def test_statistics_go_back_with_the_tokens() -> None:
    tokens = random_tokens(600, seed=8, heads=1)
    cache, fresh = filled(tokens), filled(tokens.cut(0, 300))
    assert cache.trim(300) == 300
    assert cache.fp16_key_bytes == fresh.fp16_key_bytes
    assert cache.fixed_width_key_bytes == fresh.fixed_width_key_bytes
    assert cache.entropy_savings == pytest.approx(fresh.entropy_savings)


# ---- bits by depth --------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("n_layers", [1, 2, 3, 7, 32])
def test_bits_fall_with_depth_and_average_to_the_setting(
    bits: int, groups: int, n_layers: int
) -> None:
    config = config_of(cachegen_bits=bits, cachegen_layer_groups=groups)
    given = [cachegen_bits(config, layer, n_layers) for layer in range(n_layers)]
    assert given == sorted(given, reverse=True)
    assert set(given) <= {2, 3, 4, 5, 6, 8}
    assert sum(given) == n_layers * (8 if bits == 7 else bits)


def test_three_depths_by_default() -> None:
    given = [cachegen_bits(config_of(), layer, 32) for layer in range(32)]
    assert given == [5] * 10 + [4] * 12 + [3] * 10


def test_a_layer_is_built_with_its_own_bits() -> None:
    shape = shape_of(random_tokens(1))
    first = build(config_of(), shape, LayerContext(layer=0, n_layers=6))
    last = build(config_of(), shape, LayerContext(layer=5, n_layers=6))
    fixed = build(config_of(cachegen_resolved_bits=6), shape, LayerContext(layer=5, n_layers=6))
    assert (first.assigned_bits, last.assigned_bits, fixed.assigned_bits) == (5, 3, 6)
