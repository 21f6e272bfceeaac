"""kvquant: exact sinks, one fit for any chunking, tables by block, bytes of the formula."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from cache_lab import (
    Tokens,
    feed,
    held_rows,
    new_cache,
    random_tokens,
    same,
    same_state,
    shape_of,
    worst,
)

from veloxquant.cache.builder import build_layer
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import KVQuantOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.methods.kvquant import fit
from veloxquant.quantizers.sizes import LayerShape


def config_of(**fields) -> KVCacheConfig:
    return KVCacheConfig(method="kvquant", options=KVQuantOptions(**fields))


def cache_of(tokens, **fields):
    return new_cache(config_of(**fields), shape_of(tokens))


@pytest.mark.parametrize("total", [1, 3, 64, 98, 99, 127, 128, 200])
def test_sinks_and_what_waits_are_the_input(total: int) -> None:
    tokens = random_tokens(total, seed=1, heads=1)
    cache = cache_of(tokens, kvquant_n_sink=3)
    feed(cache, tokens, 50)
    cache.commit()
    sinks = min(total, 3)
    coded = 0 if total < 99 else total // 32 * 32 - 3
    assert cache.sink_kept == sinks
    for got, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert same(got[:, :, :sinks], true[:, :, :sinks])
        assert same(got[:, :, sinks + coded :], true[:, :, sinks + coded :])
        if coded:
            assert worst(got, true) > 1e-3


@pytest.mark.parametrize("refit", [0, 48])
def test_the_fit_does_not_depend_on_the_pieces(refit: int) -> None:
    tokens = random_tokens(230, seed=2, batch=2)
    caches = []
    for size in (5, 64, 230):
        caches.append(cache_of(tokens, kvquant_refit_interval=refit))
        feed(caches[-1], tokens, size)
    for other in caches[1:]:
        same_state(caches[0], other)


def test_rows_of_a_batch_do_not_meet() -> None:
    tokens = random_tokens(200, seed=3, batch=2)
    both, second = cache_of(tokens), cache_of(tokens.row(1))
    feed(both, tokens)
    feed(second, tokens.row(1))
    both.commit()
    second.commit()
    for a, b in zip(held_rows(both), held_rows(second), strict=True):
        assert worst(a[1:], b) < 1e-6


def test_what_is_told() -> None:
    tokens = random_tokens(200, seed=4)
    cache = cache_of(tokens, kvquant_outlier_fraction=0.05)
    assert cache.key_levels is None
    assert cache.outlier_count == 0
    feed(cache, tokens)
    cache.commit()
    assert cache.nuq_bits == 3
    assert cache.key_levels.shape == cache.value_levels.shape == (1, 2, 1, 8)
    assert (cache.key_levels[..., 1:] >= cache.key_levels[..., :-1]).all().item()
    assert cache.key_outlier_thresh.shape == (1, 2, 1, 64)
    assert cache.outlier_count == 2 * 2 * 4 * 191
    assert cache.effective_bits == pytest.approx(16 * cache.nbytes / cache.full_bytes())


def test_blocks_are_fitted_again() -> None:
    tokens = random_tokens(300, seed=5, dtype=mx.bfloat16)
    cache = cache_of(tokens, kvquant_refit_interval=100)
    feed(cache, tokens)
    cache.commit()
    assert cache.keys_stream.body.length == 200
    config = config_of(kvquant_refit_interval=100)
    assert cache.nbytes == held(config, shape_of(tokens), 300).nbytes
    assert not mx.array_equal(cache.key_levels[:, :, 0], cache.key_levels[:, :, 1]).item()


def test_trimmed_below_the_fit_and_fed_again() -> None:
    tokens, other = random_tokens(200, seed=6), random_tokens(200, seed=7, factor=3.0)
    cache, fresh = cache_of(tokens), cache_of(tokens)
    feed(cache, tokens)
    cache.trim(199)
    feed(cache, other)
    feed(fresh, tokens.cut(0, 1).then(other), 100)
    same_state(cache, fresh)


def test_bytes_of_the_default() -> None:
    """124 bytes a token by the formula; the sink, constants and growth steps on top."""
    size = held(config_of(), LayerShape(1, 1, 128, 128), 4_096).nbytes
    assert 124 * 4_096 <= size <= 1.05 * 124 * 4_096


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kvquant_bits", 1), ("kvquant_bits", 5), ("kvquant_outlier_fraction", 0.11),
        ("kvquant_outlier_fraction", -0.01), ("kvquant_group_size", 16),
        ("kvquant_lloyd_iters", -1), ("kvquant_refit_interval", -1), ("kvquant_n_sink", -1),
    ],
)  # fmt: skip
def test_out_of_range(field: str, value: object) -> None:
    with pytest.raises(QuantizerConfigError, match=f"{field}={value}"):
        cache_of(random_tokens(1), **{field: value})


def check_kernel(tokens, **fields) -> None:
    """Decode steps through the compiled kernel are those of the array operations."""
    caches = [cache_of(tokens, **fields) for _ in range(2)]
    caches[1].use_kernels = False
    n = tokens.length - 2
    outs = []
    for cache in caches:
        feed(cache, tokens.cut(0, n), 200)
        outs.append(feed(cache, tokens.cut(n, n + 2), 1))
    assert worst(*outs) < 2e-4


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("share", [0.0, 0.05])
def test_the_kernel_reads_levels_and_slots(bits: int, share: float) -> None:
    for heads, dim, group in ((1, 64, 32), (3, 80, 64)):
        tokens = random_tokens(300, seed=8, heads=heads, k_dim=dim)
        check_kernel(
            tokens, kvquant_bits=bits, kvquant_outlier_fraction=share, kvquant_group_size=group
        )


def test_blocks_with_tables_of_their_own_are_read_by_array_operations() -> None:
    check_kernel(random_tokens(300, seed=9), kvquant_refit_interval=64)


def turned(n: int, rope: nn.RoPE) -> Tokens:
    """Keys with a mean of their own for each channel, rotated as in a model."""
    tokens = random_tokens(n, seed=20)
    mean = 3 * mx.random.normal((1, 2, 1, 64), key=mx.random.key(21))
    return tokens._replace(keys=rope(tokens.keys + mean))


def test_ranges_of_the_first_keys_hold_at_later_positions() -> None:
    rope = nn.RoPE(64)
    tokens = turned(2000, rope)
    lost = {}
    for name, known in (("known", rope), ("unknown", None)):
        context = LayerContext(views=True, rope=known)
        cache = build_layer(config_of(kvquant_bits=4), shape_of(tokens), context)
        feed(cache, tokens, 500)
        cache.commit()
        lost[name] = mx.square(held_rows(cache)[0] - tokens.keys)[:, :, 1000:].mean().item()
    assert lost["known"] < 0.25 * lost["unknown"]


def test_a_calibration_is_made_for_all_positions() -> None:
    rope = nn.RoPE(64)
    tokens = turned(2000, rope)
    sample = LayerSample(
        0, 1, shape_of(tokens), tokens.keys[0, :, :256], tokens.values[0, :, :256], None,
        mx.arange(256), rope,
    )  # fmt: skip
    lost = {}
    for name, known in (("known", rope), ("unknown", None)):
        found = fit(config_of(kvquant_bits=4), sample._replace(rope=known))
        context = LayerContext(views=True, rope=rope, artifacts=found)
        cache = build_layer(config_of(kvquant_bits=4), shape_of(tokens), context)
        assert cache.calibrated
        feed(cache, tokens, 500)
        cache.commit()
        lost[name] = mx.square(held_rows(cache)[0] - tokens.keys)[:, :, 1000:].mean().item()
    assert lost["known"] < 0.5 * lost["unknown"]


def late_loss(tokens: Tokens, *, known: bool) -> float:
    """Share of the energy of later keys that their codes lose."""
    context = LayerContext(views=True, rope=nn.RoPE(64) if known else None)
    cache = build_layer(config_of(), shape_of(tokens), context)
    feed(cache, tokens, 64)
    cache.commit()
    got, true = held_rows(cache)[0][:, :, 140:], tokens.keys[:, :, 140:]
    return float((mx.square(got - true).sum() / mx.square(true).sum()).item())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("rounded", [mx.float32, mx.bfloat16], ids=str)
def test_first_tokens_that_are_alike_do_not_spoil_the_later_ones(
    known: bool, rounded: mx.Dtype
) -> None:
    """A prompt that begins with blanks or padding says little about ranges."""
    tokens, place = random_tokens(300, seed=22), mx.arange(300)
    usual = late_loss(tokens._replace(keys=nn.RoPE(64)(tokens.keys)), known=known)
    for words in (1, 2, 8):
        keys = mx.take(tokens.keys, mx.where(place < 100, 5 + place % words, place), axis=2)
        keys = nn.RoPE(64)(keys).astype(rounded).astype(mx.float32)
        assert late_loss(tokens._replace(keys=keys), known=known) < 2 * usual
    keys = nn.RoPE(64)(mx.where(place[:, None] < 100, 0.0, tokens.keys))
    assert late_loss(tokens._replace(keys=keys), known=known) < 2 * usual


def test_first_tokens_that_are_nearly_alike_do_not_spoil_the_later_ones() -> None:
    tokens, place = random_tokens(300, seed=22), mx.arange(300)[:, None]
    usual = late_loss(tokens._replace(keys=nn.RoPE(64)(tokens.keys)), known=True)
    noise = 0.01 * mx.random.normal(tokens.keys.shape, key=mx.random.key(23))
    keys = nn.RoPE(64)(mx.where(place < 100, tokens.keys[:, :, 5:6] * (1 + noise), tokens.keys))
    assert late_loss(tokens._replace(keys=keys), known=True) < 8 * usual


def test_what_repeats_in_one_row_of_a_batch_leaves_the_others_alone() -> None:
    both = random_tokens(200, seed=26, batch=2)
    keys = mx.where(mx.arange(2)[:, None, None, None] == 0, both.keys[:, :, 5:6], both.keys)
    both = both._replace(keys=keys)
    caches = []
    for tokens in (both, both.row(1)):
        caches.append(cache_of(tokens))
        feed(caches[-1], tokens)
        caches[-1].commit()
    assert same(held_rows(caches[0])[0][1:], held_rows(caches[1])[0])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("factor", [10.0, 1000.0, float("nan")])
def test_a_loud_first_token_does_not_spoil_the_later_ones(known: bool, factor: float) -> None:
    tokens, place = random_tokens(300, seed=24), mx.arange(300)[:, None]
    usual = late_loss(tokens._replace(keys=nn.RoPE(64)(tokens.keys)), known=known)
    keys = nn.RoPE(64)(mx.where(place == 20, factor * tokens.keys, tokens.keys))
    assert late_loss(tokens._replace(keys=keys), known=known) < 1.2 * usual


def test_keys_of_16_bits_stay_finite_where_the_rotation_is_known() -> None:
    tokens = random_tokens(200, seed=25, dtype=mx.float16)
    tokens = tokens._replace(keys=(mx.sign(tokens.keys) * 40_000).astype(mx.float16))
    context = LayerContext(views=True, rope=nn.RoPE(64))
    cache = build_layer(config_of(), shape_of(tokens), context)
    feed(cache, tokens)
    cache.commit()
    assert mx.isfinite(held_rows(cache)[0]).all().item()
