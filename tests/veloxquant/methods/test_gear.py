"""gear: what corrections gain, what they cost, and that nothing hangs on how a prompt is cut."""

from typing import Any

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
from veloxquant.config.options import GEAROptions
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec

C = 128


def cache_of(tokens: Tokens, **options: Any) -> Any:
    config = KVCacheConfig(method="gear", options=GEAROptions(**options))
    return new_cache(config, shape_of(tokens))


def filled(tokens: Tokens, size: int = 256, **options: Any) -> Any:
    cache = cache_of(tokens, **options)
    feed(cache, tokens, size)
    cache.commit()
    return cache


def structured(tokens: int = 512, dim: int = 128, dtype: mx.Dtype = mx.float32) -> Tokens:
    """Rank-8 rows, noise, five loud channels."""
    draws = mx.random.split(mx.random.key(5), 4)
    shape = (1, 1, tokens)
    rows = mx.random.normal((*shape, 8), key=draws[0]) @ mx.random.normal((8, dim), key=draws[1])
    rows = rows / 2 + mx.random.normal((*shape, dim), key=draws[2])
    loud = mx.where(mx.arange(dim) % 25 == 3, 8.0, 1.0)
    queries = mx.random.normal((1, 2, tokens, dim), key=draws[3])
    return Tokens(*(a.astype(dtype) for a in (queries, rows * loud, rows)))


def error(cache: Any, tokens: Tokens) -> float:
    keys, values = held_rows(cache)
    lost = mx.square(keys - tokens.keys).sum() + mx.square(values - tokens.values).sum()
    whole = mx.square(tokens.keys).sum() + mx.square(tokens.values).sum()
    return float((lost / whole).item())


def test_without_corrections_it_is_the_backbone() -> None:
    tokens = random_tokens(C, seed=1)
    keys, values = held_rows(filled(tokens, gear_rank=0, gear_sparse_fraction=0.0))
    for spec, rows, got in (
        (AffineChannelSpec(2, 32), tokens.keys, keys),
        (AffineTokenSpec(2, 32), tokens.values, values),
    ):
        codec = codec_for(spec, 64)
        assert same(got, codec.decode(codec.encode(rows), mx.float32))


def test_each_correction_helps_and_both_help_most() -> None:
    tokens = structured()
    plain, factors, exact, both = (
        error(filled(tokens, gear_rank=rank, gear_sparse_fraction=share), tokens)
        for rank, share in ((0, 0.0), (4, 0.0), (0, 0.01), (4, 0.01))
    )
    assert both < min(factors, exact) < max(factors, exact) < plain
    # squared errors: 15 % less in norm
    assert both <= 0.85**2 * plain


@pytest.mark.parametrize(
    "steps",
    [
        [{"gear_rank": r} for r in (0, 1, 4, 16)],
        [{"gear_sparse_fraction": s} for s in (0.0, 0.01, 0.03, 0.1)],
        [{"gear_bits": b} for b in (2, 3, 4)],
    ],
)
def test_more_never_loses(steps: list[dict[str, Any]]) -> None:
    tokens = structured(256, 64)
    errors = [error(filled(tokens, **options), tokens) for options in steps]
    assert errors == sorted(errors, reverse=True)


def test_full_rank_gives_the_rows_back() -> None:
    tokens = structured(128, 64)
    cache = filled(tokens, gear_rank=64)
    for got, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert worst(got, true) <= 1e-3 * mx.abs(true).max().item()
    assert cache.error_recovery_ratio == pytest.approx(1, abs=5e-4)


def test_outliers_are_exact() -> None:
    plain = structured(128, 64)
    spikes = mx.where(mx.arange(128)[:, None] == (2 * mx.arange(64))[None], 60.0, 0.0)
    tokens = plain._replace(keys=plain.keys + spikes, values=plain.values + spikes)
    for got, true in zip(held_rows(filled(tokens)), tokens[1:], strict=True):
        assert worst(mx.where(spikes > 0, got, 0), mx.where(spikes > 0, true, 0)) <= 1e-5


@pytest.mark.parametrize("kernels", [None, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"gear_rank": 0}, {"gear_rank": 100}, {"gear_sparse_fraction": 0.0}, {"gear_bits": 3}],
)
def test_attention_reads_what_it_holds(options: dict[str, Any], kernels: bool | None) -> None:
    tokens = random_tokens(900, seed=12, heads=2, repeat=3, k_dim=128, v_dim=96)
    cache = cache_of(tokens, **options)
    cache.use_kernels = kernels
    cache.update_and_fetch(*tokens.cut(0, 899)[1:])
    last = tokens.cut(899, 900)
    out = attend(cache, last)
    keys, values = held_rows(cache)
    wanted = mx.fast.scaled_dot_product_attention(last.queries, keys, values, scale=128**-0.5)
    assert worst(out, wanted) <= 1e-4


def test_the_state_does_not_depend_on_the_pieces() -> None:
    tokens = random_tokens(420, seed=6)
    whole = filled(tokens, 420)
    for size in (1, 130):
        same_state(whole, filled(tokens, size))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_sizes_are_planned(group: int, dim: int) -> None:
    tokens = random_tokens(1_100, seed=7, heads=1, k_dim=dim, v_dim=96, dtype=mx.bfloat16)
    options = GEAROptions(gear_group_size=group, gear_sparse_fraction=0.02)
    config = KVCacheConfig(method="gear", options=options)
    cache = new_cache(config, shape_of(tokens))
    for start in range(0, 1_100, 275):
        cache.update_and_fetch(*tokens.cut(start, start + 275)[1:])
    cache.commit()
    assert cache.nbytes == held(config, shape_of(tokens), 1_100).nbytes


def test_corrections_stay_small_beside_the_backbone() -> None:
    """A rank picked by the energy of white noise would be nearly full."""
    tokens = random_tokens(640, seed=8, heads=1, k_dim=128, dtype=mx.bfloat16)
    cache = cache_of(tokens)
    cache.update_and_fetch(*tokens[1:])
    cache.commit()
    assert cache.effective_compression_ratio > 3
    assert cache.compressed_key_bytes < 1.6 * cache.base_only_key_bytes
    assert cache.compressed_value_bytes < 1.6 * cache.base_only_value_bytes
    assert 0 < cache.error_recovery_ratio < 1


def test_statistics_go_back_with_the_tokens() -> None:
    tokens, other = random_tokens(256, seed=9), random_tokens(256, seed=10)
    cache = filled(tokens)
    ratio = filled(tokens.cut(0, 128)).error_recovery_ratio
    assert cache.trim(128) == 128
    assert cache.error_recovery_ratio == pytest.approx(ratio)
    feed(cache, other)
    keys, _ = held_rows(cache)
    assert worst(keys[:, :, 128:], other.keys) < 4


def test_values_may_stay_exact_and_are_counted_as_such() -> None:
    tokens = random_tokens(300, seed=11)
    cache = filled(tokens, gear_quantize_values=False)
    assert same(held_rows(cache)[1], tokens.values)
    assert cache.compressed_value_bytes == cache.base_only_value_bytes == 0
    assert cache.value_fp16_bytes >= tokens.values.nbytes
    assert cache.compressed_key_bytes + cache.residual_fp16_bytes == cache.nbytes


def test_more_factors_than_the_kernel_reads_channels() -> None:
    tokens = random_tokens(260, seed=9, heads=1, k_dim=576)
    cache = filled(tokens, 64, gear_rank=513)
    assert worst(held_rows(cache)[0], tokens.keys) < 1.0
    attend(cache, random_tokens(1, seed=10, heads=1, k_dim=576))


@pytest.mark.parametrize("rank", [8, 9, 64])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_few_and_many_factors_are_planned_and_read_alike(rank: int, dtype: mx.Dtype) -> None:
    tokens = random_tokens(384, seed=11, dtype=dtype)
    caches = [cache_of(tokens, gear_rank=rank) for _ in range(2)]
    caches[1].use_kernels = False
    outs = []
    for cache in caches:
        feed(cache, tokens, 128)
        outs.append(feed(cache, random_tokens(1, seed=12, dtype=dtype), 1))
    caches[0].commit()
    config = KVCacheConfig(method="gear", options=GEAROptions(gear_rank=rank))
    assert caches[0].nbytes == held(config, shape_of(tokens), 385).nbytes
    assert worst(*outs) < (2e-4 if dtype == mx.float32 else 5e-3)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("channels", [1, 128])
@pytest.mark.parametrize("options", [{}, {"gear_sparse_fraction": 0.0}, {"gear_rank": 0}], ids=str)
def test_what_is_no_number_spoils_its_own_row_alone(
    wrong: float, side: int, channels: int, options: dict[str, Any]
) -> None:
    """The entries that are none are lost; the others of the row and its neighbours are kept."""
    tokens = structured()
    place, channel = mx.arange(512)[:, None], mx.arange(128)
    hit = (place == 300) & (channel < channels)
    rows = list(tokens)
    rows[side] = mx.where(hit, wrong, rows[side])
    broken, whole = filled(Tokens(*rows), **options), filled(tokens, **options)
    now, usual = (held_rows(cache)[side - 1] for cache in (broken, whole))
    assert mx.isfinite(now).all().item()
    lost = [mx.where(hit, 0.0, a - tokens[side]) for a in (now, usual)]
    lost = [mx.square(mx.where((place == 300) & (channels > 1), 0.0, a)).sum() for a in lost]
    assert mx.all(lost[0] < 1.02 * lost[1]).item()
