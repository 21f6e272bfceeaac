"""vecinfer: the transform, trained and stand-in codebooks, bytes, attention from codes."""

import logging

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import feed, held_rows, new_cache, random_tokens, same, shape_of, worst

from veloxquant.allocators.vecinfer import (
    apply_dual_transform_keys,
    apply_dual_transform_queries,
    calibrate_smooth_factors,
    compute_query_lut,
    dequantize_vq,
    quantize_vq,
    train_codebook,
    walsh_hadamard_matrix,
)
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import VecInferOptions
from veloxquant.core.exceptions import CodebookDimensionMismatch, QuantizerConfigError
from veloxquant.methods import vecinfer


def cache_of(tokens, **fields):
    return new_cache(KVCacheConfig(method="vecinfer", **fields), shape_of(tokens))


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


# ---- functions ------------------------------------------------------------------------------


@pytest.mark.parametrize("repeat", [1, 4])
def test_logits_survive_the_dual_transform(repeat: int) -> None:
    h = walsh_hadamard_matrix(64)
    smooth = mx.exp(mx.random.uniform(-2.3, 2.3, (2, 64), key=mx.random.key(1)))
    k, q = normal(1, 2, 20, 64), normal(1, 2 * repeat, 3, 64, seed=2)
    kt = mx.repeat(apply_dual_transform_keys(k, smooth, h), repeat, axis=1)
    got = apply_dual_transform_queries(q, smooth, h) @ kt.swapaxes(-1, -2)
    want = q @ mx.repeat(k, repeat, axis=1).swapaxes(-1, -2)
    assert worst(got, want) < 1e-5 * mx.abs(want).max().item()
    with pytest.raises(ValueError, match="3 heads"):
        apply_dual_transform_queries(normal(1, 3, 2, 64), smooth, h)
    with pytest.raises(ValueError, match="channels"):
        apply_dual_transform_keys(k, smooth[:, :32], h)


def test_head_axis_is_the_third_from_the_end() -> None:
    h, smooth = walsh_hadamard_matrix(8), mx.array([[1.0] * 8, [4.0] * 8])
    k = normal(2, 5, 8)
    turned = apply_dual_transform_keys(k, smooth, h)
    assert worst(turned[1], k[1] / 4 @ h) < 1e-6
    mean = apply_dual_transform_keys(normal(3, 5, 8), smooth, h)
    assert worst(mean, normal(3, 5, 8) / 2.5 @ h) < 1e-6


def test_worked_example() -> None:
    k = mx.array([[4.0, 1.0], [-16.0, 0.25]])
    smooth = calibrate_smooth_factors(k)
    assert smooth.tolist() == [4.0, 1.0]
    turned = apply_dual_transform_keys(k, smooth, walsh_hadamard_matrix(2))
    assert np.allclose(turned, [[1.4142, 0], [-2.6517, -3.0052]], atol=1e-4)
    dead = calibrate_smooth_factors(mx.zeros((3, 2, 4)))
    assert dead.shape == (2, 4)
    assert np.allclose(dead, 0.01)


@pytest.mark.parametrize("d", [1, 64, 128, 256])
def test_walsh_hadamard_matrix(d: int) -> None:
    h = np.array(walsh_hadamard_matrix(d), dtype=np.float64)
    assert np.abs(h @ h.T - np.eye(d)).max() < 1e-6
    assert np.allclose(h[0], d**-0.5)
    with pytest.raises(ValueError, match="power of two"):
        walsh_hadamard_matrix(d * 3)


def test_more_bits_lose_less_and_tables_of_products_agree() -> None:
    x, lost = normal(2000, 8), []
    for bits in (2, 4, 6):
        book = train_codebook(x, 1 << bits)
        codes = quantize_vq(x, book, 8)
        assert codes.dtype == mx.int32
        lost.append(mx.square(dequantize_vq(codes, book) - x).mean().item())
    assert lost == sorted(lost, reverse=True)
    q = normal(3, 16, seed=1)
    lut = compute_query_lut(q, book, 8)
    assert lut.shape == (3, 2, 64)
    assert worst(lut[1, 1], book @ q[1, 8:]) < 1e-5


def test_the_transform_spares_quiet_channels_from_loud_ones() -> None:
    """Three channels thirty times as loud, 8 channels in 8 bits."""
    scale = mx.where(_loud(64), 30.0, 1.0)
    k, q = normal(1024, 64) * scale, normal(64, 64, seed=3) / scale
    h, smooth = walsh_hadamard_matrix(64), calibrate_smooth_factors(k)

    def error(rows: mx.array, back) -> float:
        book = train_codebook(rows.reshape(-1, 8), 256, max_iter=15)
        logits = q @ back(dequantize_vq(quantize_vq(rows, book, 8), book)).T
        return (mx.square(logits - q @ k.T).sum() / mx.square(q @ k.T).sum()).item()

    plain = error(k, lambda y: y)
    turned = error(apply_dual_transform_keys(k, smooth, h), lambda y: (y @ h.T) * smooth)
    assert turned < 0.95 * plain, (turned, plain)


def _loud(dim: int) -> mx.array:
    at = mx.arange(dim)
    return (at == 3) | (at == 20) | (at == 41)


# ---- the cache ------------------------------------------------------------------------------


def test_bytes_of_the_default() -> None:
    tokens = random_tokens(256, heads=2, k_dim=128, dtype=mx.bfloat16)
    cache = cache_of(tokens)
    feed(cache, tokens, 128)
    cache.commit()
    assert cache.nbytes == 2 * 256 * (48 + 16 + 2 + 2)
    assert cache.codebook_bytes == 2 * (4096 * 4 + 256 * 8)
    books = {"key_codebook": np.ones((4096, 4)), "value_codebook": np.ones((256, 8))}
    trained = cache_of(tokens, **books)
    feed(trained, tokens, 128)
    trained.commit()
    assert trained.nbytes == 2 * 256 * 64
    assert trained.effective_compression_ratio == 8
    assert held(KVCacheConfig(method="vecinfer", **books), shape_of(tokens), 256).nbytes == 32768


def test_the_stand_in_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tokens = random_tokens(1)
    vecinfer._told.clear()
    with caplog.at_level(logging.WARNING, logger="veloxquant.methods.vecinfer"):
        assert not cache_of(tokens).calibrated
        cache_of(tokens)
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "vecinfer has no key_codebook", "vecinfer has no value_codebook",
    ]  # fmt: skip


def test_the_stand_in_has_the_error_of_its_rate() -> None:
    tokens = random_tokens(256, seed=2)._replace(keys=normal(1, 2, 256, 64, seed=9))
    cache = cache_of(tokens)
    feed(cache, tokens, 64)
    cache.commit()
    keys, values = held_rows(cache)
    assert mx.square(keys - tokens.keys).mean().item() == pytest.approx(0.0285, rel=0.12)
    assert mx.square(values - tokens.values).mean().item() == pytest.approx(0.326, rel=0.06)


def test_given_tables_are_used() -> None:
    tokens = random_tokens(64, seed=3)
    book = np.array(tokens.values).reshape(-1, 8)[:1024]
    cache = cache_of(tokens, value_codebook=book, options=VecInferOptions(value_codebook_bits=10))
    feed(cache, tokens.cut(0, 32))
    cache.commit()
    first = held_rows(cache)[1]
    assert worst(first[:, 0], tokens.values[:, 0, :32]) < 1e-6


def test_a_calibration_serves_what_the_configuration_leaves_open() -> None:
    tokens = random_tokens(600, seed=4, heads=2)
    config = KVCacheConfig(
        method="vecinfer", options=VecInferOptions(key_codebook_bits=6, value_codebook_bits=6)
    )
    shape = shape_of(tokens)
    sample = LayerSample(
        0, 1, shape, tokens.keys[0], tokens.values[0], tokens.queries[0], mx.arange(600)
    )
    found = vecinfer.fit(sample, config)
    assert found["smooth_factors"].shape == (2, 64)
    plain = vecinfer.build(config, shape, LayerContext())
    fitted = vecinfer.build(config, shape, LayerContext(artifacts=found))
    assert fitted.calibrated
    lost = []
    for cache in (plain, fitted):
        cache.returns = "views"
        feed(cache, tokens, 200)
        lost.append(mx.square(held_rows(cache)[0] - tokens.keys).mean().item())
    assert lost[1] < lost[0]
    assert fitted.nbytes < plain.nbytes


@pytest.mark.parametrize(
    "fields",
    [
        {"key_codebook": np.ones((256, 4))},
        {"value_codebook": np.ones((256, 4))},
        {"smooth_factors": np.ones((3, 64))},
    ],
)
def test_tables_of_another_shape_are_refused(fields) -> None:
    with pytest.raises(CodebookDimensionMismatch, match=next(iter(fields))):
        cache_of(random_tokens(1), **fields)


def test_pieces_that_do_not_divide_are_refused() -> None:
    with pytest.raises(QuantizerConfigError, match="divisor of head_dim=128"):
        cache_of(random_tokens(1), options=VecInferOptions(key_sub_dim=5))
    small = VecInferOptions(key_sub_dim=64, key_codebook_bits=8)
    with pytest.raises(QuantizerConfigError, match="divide heads of 80"):
        cache_of(random_tokens(1, k_dim=80), options=small)
    with pytest.raises(QuantizerConfigError, match="positive"):
        cache_of(random_tokens(1), smooth_factors=np.zeros(64))


def test_attention_from_the_codes() -> None:
    tokens = random_tokens(90, seed=5, repeat=2)
    cache = cache_of(tokens)
    feed(cache, tokens)
    cache.commit()
    keys, values = (mx.repeat(a, 2, axis=1) for a in held_rows(cache))
    q = tokens.queries[:, :, -4:]
    got = cache.fused_sdpa(q, 0.125)
    assert (
        worst(
            got, mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.125, mask="causal")
        )
        < 1e-4
    )
    near = cache.fused_sdpa(q[:, :, -1:], 0.125, sliding_window=10)
    assert (
        worst(
            near,
            mx.fast.scaled_dot_product_attention(
                q[:, :, -1:], keys[:, :, -10:], values[:, :, -10:], scale=0.125
            ),
        )
        < 1e-4
    )


def test_a_window_only_where_somebody_asks_for_it() -> None:
    tokens = random_tokens(200, seed=6)
    none = held_rows(_fed(tokens))[0]
    assert same(held_rows(_fed(tokens, options=VecInferOptions()))[0], none)
    assert not same(none[:, :, -1:], tokens.keys[:, :, -1:])
    for n in (40, 127, 128, 129):
        for given in ({"residual_length": n}, {"options": VecInferOptions(residual_length=n)}):
            window = _fed(tokens, **given)
            assert same(held_rows(window)[0][:, :, -n:], tokens.keys[:, :, -n:]), given
            assert worst(held_rows(window)[0][:, :, :4], none[:, :, :4]) < 1e-4, given


@pytest.mark.parametrize(("sub", "width"), [(1, 12), (2, 14), (64, 10)])
def test_codebooks_that_take_minutes_are_refused(sub: int, width: int) -> None:
    options = VecInferOptions(key_sub_dim=sub, key_codebook_bits=width)
    with pytest.raises(QuantizerConfigError, match=f"key_codebook_bits={width} .* must be one of"):
        cache_of(random_tokens(1), options=options)
    options = VecInferOptions(value_sub_dim=sub, value_codebook_bits=width)
    with pytest.raises(QuantizerConfigError, match=f"value_codebook_bits={width} .* must be one"):
        cache_of(random_tokens(1), options=options)
    if sub > 1:
        return
    given = {"key_codebook": mx.random.normal((1 << width, sub))}
    options = VecInferOptions(key_sub_dim=sub, key_codebook_bits=width)
    assert cache_of(random_tokens(1), options=options, **given).codebook_bytes > 0


def _fed(tokens, **fields):
    cache = cache_of(tokens, **fields)
    feed(cache, tokens)
    cache.commit()
    return cache
