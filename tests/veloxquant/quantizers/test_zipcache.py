"""Mixed widths by token on plain matrices."""

import mlx.core as mx
import pytest

from veloxquant.quantizers.zipcache import (
    base_only_bytes,
    channel_dequant,
    channel_quant,
    saliency_mask,
    token_key_norms,
    zipcache_bytes,
    zipcache_compress,
    zipcache_quant_dequant,
    zipcache_reconstruct,
)


def rows(n: int = 100, seed: int = 1) -> mx.array:
    return mx.random.normal((n, 64), key=mx.random.key(seed))


def error(x: mx.array, **fields) -> float:
    return mx.square(zipcache_quant_dequant(x, **fields).astype(mx.float32) - x).mean().item()


def test_small_keys_are_salient_and_the_share_is_rounded_up() -> None:
    norms = mx.array([3.0, 1.0, 1.0, 5.0, 0.5, 9.0, 1.0])
    assert saliency_mask(norms, 0.4).tolist() == [False, True, True, False, True, False, False]
    assert saliency_mask(norms, 0.0).sum().item() == 0
    assert saliency_mask(norms, 1.0).all().item()
    assert saliency_mask(token_key_norms(rows(128)), 0.2).sum().item() == 26


@pytest.mark.parametrize(("share", "bits"), [(0.0, 2), (1.0, 4)])
def test_one_class_is_one_width(share: float, bits: int) -> None:
    x = rows(96)
    flat = channel_dequant(*channel_quant(x, bits))
    assert mx.array_equal(zipcache_quant_dequant(x, hi_fraction=share), flat.astype(mx.float16))


def test_tokens_come_back_in_their_own_order() -> None:
    x = mx.arange(50)[:, None] * mx.ones((1, 64))
    out = zipcache_quant_dequant(x, hi_bits=8, lo_bits=6, hi_fraction=0.3, group_size=128)
    assert mx.abs(out - x).max().item() < 0.5


def test_error_falls_with_share_and_widths() -> None:
    x = rows(256)
    shares = [error(x, hi_fraction=f) for f in (0, 0.25, 0.5, 1)]
    assert shares == sorted(shares, reverse=True)
    assert error(x, hi_bits=6) <= error(x, hi_bits=4)
    assert error(x, lo_bits=3) <= error(x, lo_bits=2)


def test_bytes() -> None:
    state = zipcache_compress(rows(128))
    high, low = 26 * 64 * 4 // 8 + 2 * 4 * 64, 102 * 64 * 2 // 8 + 2 * 4 * 64 * 4
    assert zipcache_bytes(state) == high + low + 128
    assert zipcache_bytes(state, 128) == high + 102 * 16 + 2 * 4 * 64 + 128
    assert base_only_bytes(128, 64, 4) == 128 * 32 + 2 * 4 * 64 * 4
    assert zipcache_reconstruct(state).dtype == mx.float16
