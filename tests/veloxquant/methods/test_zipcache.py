"""zipcache: who is salient, what it gets, and that order is kept where it matters."""

import math

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
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import ZipCacheOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.dsa.mlx_pack import unpack
from veloxquant.quantizers.affine import AffineChannelCodec, affine_decode, affine_encode
from veloxquant.quantizers.scaled import ScaledTokenCodec
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.affine import AffineChannelSpec
from veloxquant.quantizers.specs.tiered import ScaledTokenSpec

C = 128


def config_of(**fields) -> KVCacheConfig:
    given = {f"zipcache_{name}": value for name, value in fields.items()}
    return KVCacheConfig(method="zipcache", options=ZipCacheOptions(**given))


def cache_of(tokens: Tokens, **fields):
    return new_cache(config_of(**fields), shape_of(tokens))


def filled(tokens: Tokens, size: int | None = None, **fields):
    cache = cache_of(tokens, **fields)
    feed(cache, tokens, size)
    cache.commit()
    return cache


def classes(cache) -> mx.array:
    words = cache.keys_stream.body.codec and cache.streams()[0][1].compact()[3]["m"]
    return unpack(words, 1, words.shape[-1] * 32)


@pytest.mark.parametrize(("share", "bits"), [(0.0, 2), (1.0, 4)])
def test_one_class_is_one_width(share: float, bits: int) -> None:
    tokens = random_tokens(2 * C, seed=1)
    cache = filled(tokens, hi_fraction=share)
    codec = AffineChannelCodec(64, AffineChannelSpec(bits, 32))
    flat = codec.decode(codec.encode(tokens.keys), mx.float32)
    assert same(held_rows(cache)[0], flat)


def test_salient_tokens_are_small_keys_and_the_first_ones() -> None:
    tokens = random_tokens(2 * C, seed=2, heads=2)
    loud = mx.where(mx.arange(2 * C) < 4, 50.0, 1.0)[:, None]
    tokens = tokens._replace(keys=tokens.keys * loud)
    found = classes(filled(tokens))
    assert found[..., :4].max().item() == 0
    assert (1 - found).reshape(1, 2, 2, C).sum(axis=-1).tolist() == [[[32, 32], [32, 32]]]
    norms = mx.linalg.norm(tokens.keys, axis=-1)[..., C:]
    high, low = found[..., C:] == 0, found[..., C:] == 1
    assert (mx.where(high, norms, 0).max(-1) <= mx.where(low, norms, mx.inf).min(-1)).all().item()


@given(
    factor=st.sampled_from([2.0**-30, 2.0**-20, 2.0**12]) | st.floats(1e-7, 1e3),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=12)
def test_neither_classes_nor_losses_depend_on_the_scale(factor: float, seed: int) -> None:
    tokens = random_tokens(300, seed=seed)
    small = Tokens(tokens.queries, tokens.keys * factor, tokens.values * factor)
    one, other = filled(tokens), filled(small)
    assert mx.array_equal(classes(one), classes(other)).item()
    for mine, theirs in zip(held_rows(other), held_rows(one), strict=True):
        off = mx.linalg.norm(mine / factor - theirs) / mx.linalg.norm(theirs)
        # A power of four and its root round nothing; others may turn a code at half a step.
        assert off.item() <= (0 if (math.log2(factor) / 2).is_integer() else 0.02)


def test_salient_tokens_lose_less() -> None:
    tokens = random_tokens(4 * C, seed=3)
    cache = filled(tokens)
    high = (classes(cache) == 0)[..., None]
    for now, true in zip(held_rows(cache), tokens[1:], strict=True):
        lost = mx.square(now - true)
        mean = [(lost * where).sum() / where.sum() for where in (high, ~high)]
        assert (8 * mean[0] < mean[1]).item()


def test_order_is_kept() -> None:
    """At 8 and 6 bits every token is found where it was."""
    tokens = random_tokens(3 * C, seed=4)
    cache = filled(tokens, hi_bits=8, lo_bits=6)
    for now, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert mx.square(now - true).mean().item() < 5e-3 * mx.square(true).mean().item()


def test_error_falls_with_share_and_widths() -> None:
    tokens = random_tokens(2 * C, seed=5)

    def lost(**fields) -> list[float]:
        rows = held_rows(filled(tokens, **fields))
        return [mx.square(a - b).mean().item() for a, b in zip(rows, tokens[1:], strict=True)]

    for ladder in (
        [lost(hi_fraction=f) for f in (0.0, 0.2, 0.5, 1.0)],
        [lost(hi_bits=b) for b in (3, 4, 6, 8)],
        [lost(lo_bits=b, hi_bits=8) for b in (2, 3, 4)],
    ):
        for side in zip(*ladder, strict=True):
            assert list(side) == sorted(side, reverse=True)


def test_factors_of_channels_pay_where_ranges_differ() -> None:
    x = mx.random.normal((1, 1, 512, 128), key=mx.random.key(6))
    x = x * mx.where(mx.arange(128) < 3, 30.0, 1.0)
    codec = ScaledTokenCodec(128, ScaledTokenSpec(4, 128))
    rows = codec.decode(codec.encode(x), mx.float32)
    plain = affine_decode(affine_encode(x, 4, 128, mx.float32), 4, 128, mx.float32)

    def relative(now: mx.array) -> float:
        small = mx.square(now - x)[..., 3:].mean() / mx.square(x)[..., 3:].mean()
        return small.item()

    assert relative(rows) * 10 <= relative(plain)
    assert ScaledTokenSpec(4, 128).nbytes(128, 128, 2) == 128 * (64 + 4) + 2 * 128


@pytest.mark.parametrize("size", [1, 7, 64, 300])
def test_state_does_not_depend_on_pieces(size: int) -> None:
    tokens = random_tokens(300, seed=7)
    same_state(filled(tokens, size), filled(tokens))
    cache = filled(tokens, size)
    for now, true in zip(held_rows(cache), tokens[1:], strict=True):
        assert same(now[:, :, 2 * C :], true[:, :, 2 * C :])


@pytest.mark.parametrize("quantize_values", [True, False])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_attention_by_class_is_attention_in_order(length: int, quantize_values: bool) -> None:
    tokens = random_tokens(2 * C + 20 + length, seed=8, heads=2, repeat=3)
    cache = cache_of(tokens, quantize_values=quantize_values)
    feed(cache, tokens.cut(0, 2 * C + 20), 100)
    now = tokens.cut(2 * C + 20, 2 * C + 20 + length)
    out = attend(cache, now)
    keys, values = held_rows(cache)
    wanted = mx.fast.scaled_dot_product_attention(
        now.queries, keys, values, scale=64**-0.5, mask="causal"
    )
    assert worst(out, wanted) < 1e-4


def test_a_mask_by_position_meets_the_tokens_in_order() -> None:
    tokens = random_tokens(2 * C + 1, seed=9)
    cache = cache_of(tokens)
    feed(cache, tokens.cut(0, 2 * C))
    now = tokens.cut(2 * C, 2 * C + 1)
    keys, values = cache.update_and_fetch(now.keys, now.values)
    mask = mx.random.uniform(shape=(1, 2 * C + 1), key=mx.random.key(1)) > 0.5
    out = keys.attend(now.queries, values, 0.125, mask)
    rows = held_rows(cache)
    wanted = mx.fast.scaled_dot_product_attention(now.queries, *rows, scale=0.125, mask=mask)
    assert worst(out, wanted) < 1e-4


def test_exact_values_and_their_bytes() -> None:
    tokens = random_tokens(2 * C, seed=10, dtype=mx.bfloat16)
    cache = filled(tokens, quantize_values=False)
    assert same(held_rows(cache)[1], tokens.values)
    assert cache.compressed_value_bytes == 0
    assert cache.residual_fp16_bytes == tokens.values.nbytes


def test_bytes_at_the_documented_defaults() -> None:
    nbytes = held(config_of(), LayerShape(1, 1, 128, 128), 4096).nbytes
    codes = 128 * (32 * 4 + 96 * 2) // 8  # a block, one side
    keys = codes + 128 * 2 * 2 * 4 + 16
    values = codes + 128 * 4 + 16
    assert nbytes == 32 * (keys + values) + 2 * 128
    assert 2_097_152 / nbytes == pytest.approx(5.1, abs=0.3)


def test_widths_out_of_order_are_refused() -> None:
    with pytest.raises(QuantizerConfigError, match="zipcache_lo_bits"):
        cache_of(random_tokens(1), hi_bits=3, lo_bits=4)
