"""kivi and kivi_sink: which tokens are exact, where blocks lie, what outliers cost."""

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
    shape_of,
    state_parts,
    worst,
)

from veloxquant.config.kv_cache import KVCacheConfig

R = 128


def cache_of(tokens: Tokens, method: str = "kivi", **fields):
    return new_cache(KVCacheConfig(method=method, **fields), shape_of(tokens))


def sizes(cache) -> tuple[list[int], list[int]]:
    keys, values = cache.streams()
    return [s.length for s in keys], [s.length for s in values]


@pytest.mark.parametrize("total", [1, 127, 128, 129, 160, 300, 513])
def test_newest_tokens_are_the_input(total: int) -> None:
    tokens = random_tokens(total, seed=1, heads=1)
    cache = cache_of(tokens)
    feed(cache, tokens, 100)
    cache.commit()
    (_, k_body, k_window), (_, v_body, v_window) = sizes(cache)
    assert k_body == total // R * R
    assert k_window == total % R
    assert min(total, R) <= v_window < R + 32
    keys, values = held_rows(cache)
    assert same(keys[:, :, k_body:], tokens.keys[:, :, k_body:])
    assert same(values[:, :, v_body:], tokens.values[:, :, v_body:])
    for coded, true, n in ((keys, tokens.keys, k_body), (values, tokens.values, v_body)):
        if n:
            assert worst(coded[:, :, :n], true[:, :, :n]) > 1e-3


def test_only_windows_are_held_unpacked() -> None:
    tokens = random_tokens(1_024, seed=2, heads=2, k_dim=128, dtype=mx.bfloat16)
    cache = cache_of(tokens)
    feed(cache, tokens, 512)
    cache.commit()
    for array in cache.arrays():
        if array.dtype != mx.uint32 and array.shape[-1] == 128:
            assert array.shape[2] <= R + 32
    assert cache.effective_compression_ratio > 3.5


@pytest.mark.parametrize(("bits", "error"), [(2, 0.132), (3, 0.0281), (4, 0.0061)])
def test_error_by_width(bits: int, error: float) -> None:
    plain = random_tokens(512, seed=3, heads=2)
    tokens = plain._replace(keys=mx.random.normal(plain.keys.shape, key=mx.random.key(4)))
    cache = cache_of(tokens, bit_width_inlier=bits)
    feed(cache, tokens, 256)
    cache.commit()
    keys, values = held_rows(cache)
    lost = mx.square(keys - tokens.keys)[:, :, :256].mean().item()
    assert lost == pytest.approx(error, rel=0.04)
    lost = mx.square(values - tokens.values)[:, :, :256].mean().item()
    assert lost == pytest.approx(error, rel=0.04)


def test_decode_goes_on_packing_whole_blocks() -> None:
    tokens = random_tokens(400, seed=5, heads=1)
    cache, whole = cache_of(tokens), cache_of(tokens)
    feed(cache, tokens.cut(0, 30))
    feed(cache, tokens.cut(30, 400), 1)
    feed(whole, tokens)
    cache.commit()
    assert sizes(cache)[0] == [0, 384, 16]
    whole.commit()
    assert sizes(cache) == sizes(whole)


def test_fed_trimmed_and_fed_again() -> None:
    """Frontiers move back with the tokens: new rows must not pass for packed ones."""
    tokens, other = random_tokens(300, seed=6, heads=1), random_tokens(200, seed=7, heads=1)
    cache = cache_of(tokens)
    feed(cache, tokens)
    assert cache.trim(100) == 100
    feed(cache, other)
    keys, values = held_rows(cache)
    assert same(keys[:, :, 384:], other.keys[:, :, 184:])
    assert same(values[:, :, -R:], other.values[:, :, -R:])
    assert cache.fp16_key_bytes + cache.fp16_value_bytes == shape_of(tokens)._replace(
        itemsize=2
    ).full_bytes(400)


# ---- sinks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [1, 4, 5, 6, 5 + R, 6 + R, 140, 700])
def test_sinks_stay_and_blocks_are_counted_behind_them(total: int) -> None:
    tokens = random_tokens(total, seed=8, heads=1)
    cache = cache_of(tokens, "kivi_sink")
    feed(cache, tokens.cut(0, 1))
    if total > 1:
        assert mx.isfinite(feed(cache, tokens.cut(1, total), 64)).all().item()
    cache.commit()
    sinks = min(total, 5)
    keys, values = held_rows(cache)
    assert same(keys[:, :, :sinks], tokens.keys[:, :, :sinks])
    assert same(values[:, :, :sinks], tokens.values[:, :, :sinks])
    assert sizes(cache)[0] == [sinks, (total - sinks) // R * R, (total - sinks) % R]


def test_without_sinks_it_is_kivi() -> None:
    tokens = random_tokens(300, seed=9)
    plain = cache_of(tokens)
    none = cache_of(tokens, "kivi_sink", n_sink_tokens=0)
    for cache in (plain, none):
        feed(cache, tokens, 70)
    for path, array in state_parts(plain)[1].items():
        assert same(array, state_parts(none)[1][path])


def test_behind_the_sinks_it_is_kivi_fed_with_the_rest() -> None:
    tokens = random_tokens(305, seed=10)
    sink, rest = cache_of(tokens, "kivi_sink"), cache_of(tokens)
    feed(sink, tokens, 61)
    feed(rest, tokens.cut(5, 305), 61)
    for a, b in zip(held_rows(sink), held_rows(rest), strict=True):
        assert same(a[:, :, 5:], b)


def test_a_sink_no_longer_spoils_its_group() -> None:
    plain = random_tokens(256, seed=11, heads=1)
    loud = (mx.arange(256)[:, None] == 0) & (mx.arange(64)[None] < 2)
    tokens = plain._replace(keys=mx.where(loud, 40.0, mx.random.normal(plain.keys.shape)))
    errors = []
    for method in ("kivi", "kivi_sink"):
        cache = cache_of(tokens, method, bit_width_inlier=3)
        feed(cache, tokens)
        got = held_rows(cache)[0][:, :, 1:32, :2]
        errors.append(mx.square(got - tokens.keys[:, :, 1:32, :2]).mean().item())
    assert errors[1] * 5 <= errors[0]


def test_trimmed_below_the_sinks_and_filled_again() -> None:
    tokens, other = random_tokens(300, seed=12), random_tokens(300, seed=13)
    cache = cache_of(tokens, "kivi_sink")
    feed(cache, tokens)
    assert cache.trim(297) == 297
    assert sizes(cache) == ([3, 0, 0], [3, 0, 0])
    feed(cache, other)
    keys, _ = held_rows(cache)
    assert same(keys[:, :, :3], tokens.keys[:, :, :3])
    assert same(keys[:, :, 3:5], other.keys[:, :, :2])


def test_learned_sinks_join_the_denominator() -> None:
    tokens = random_tokens(200, seed=14, heads=1)
    with_sinks, without = cache_of(tokens), cache_of(tokens)
    for cache in (with_sinks, without):
        feed(cache, tokens.cut(0, 199))
    last = tokens.cut(199, 200)
    small = attend(with_sinks, last, mx.full((2,), 50.0))
    assert mx.abs(small).max().item() < 1e-3 < mx.abs(attend(without, last)).max().item()


def test_sinks_are_told_by_position_and_size() -> None:
    tokens = random_tokens(300, seed=31, batch=2, dtype=mx.float16)
    cache = cache_of(tokens, "kivi_sink", n_sink_tokens=5)
    assert cache.sink_positions == []
    feed(cache, tokens.cut(0, 3))
    assert cache.sink_positions == [0, 1, 2]
    feed(cache, tokens.cut(3, 300))
    cache.commit()
    assert cache.sink_positions_for(1) == cache.sink_positions == [0, 1, 2, 3, 4]
    assert cache.sink_fp16_bytes == 2 * 2 * 2 * 5 * 64 * 2  # sides, sequences, heads, rows, bytes
    with pytest.raises(IndexError, match="sequence 2"):
        cache.sink_positions_for(2)
