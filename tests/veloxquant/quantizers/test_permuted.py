"""Order and clip factor: what they are fitted to, what they gain, and the free functions."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.permuted import CLIP_FACTORS, PermutedCodec
from veloxquant.quantizers.skvq import (
    apply_permutation,
    channel_permutation,
    clipped_group_dequant,
    clipped_group_quant,
    invert_permutation,
    skvq_compressed_bytes,
    skvq_fp16_bytes,
    skvq_round_trip,
)
from veloxquant.quantizers.specs.affine import AffineTokenSpec
from veloxquant.quantizers.specs.grouped import PermutedSpec


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def codec(bits: int = 2, dim: int = 128, fit: int = 128, **fields) -> PermutedCodec:
    return codec_for(PermutedSpec(bits, 32, fit, **fields), dim)


def round_trip(made: PermutedCodec, x: mx.array) -> mx.array:
    fitted = made.fit(x[:, :, : made.spec.fit_tokens])
    return made.decode({**made.encode_fitted(x, fitted), **fitted}, mx.float32)


def error(got: mx.array, true: mx.array) -> float:
    return mx.square(got.astype(mx.float32) - true.astype(mx.float32)).mean().item()


@pytest.mark.parametrize(
    ("bits", "factor", "with_it", "without"),
    [(2, 0.75, 0.102, 0.154), (3, 0.9, 0.0252, 0.0281), (4, 1.0, 0.0061, 0.0061)],
)
def test_the_search_finds_the_factor_of_a_gaussian(
    bits: int, factor: float, with_it: float, without: float
) -> None:
    x = normal(1, 2, 512, 128)
    searched = codec(bits, fit=512, reorder=False)
    fitted = searched.fit(x)
    assert mx.abs(fitted["clip"] - factor).max().item() <= 0.051
    assert error(round_trip(searched, x), x) == pytest.approx(with_it, rel=0.03)
    plain = codec(bits, reorder=False, search=False)
    assert error(plain.decode(plain.encode(x), mx.float32), x) == pytest.approx(without, rel=0.03)


def test_without_both_it_is_the_affine_format() -> None:
    x = normal(2, 2, 40, 80)
    made = codec(dim=80, reorder=False, search=False)
    plain = codec_for(AffineTokenSpec(2, 32, minmax=True), 80)
    for name, array in plain.encode(x).items():
        assert mx.array_equal(array, made.encode(x)[name]).item()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_a_search_never_loses_on_what_it_saw(bits: int) -> None:
    x = normal(1, 3, 64, 96, seed=1) ** 3
    with_it = round_trip(codec(bits, 96, 64, reorder=False), x)
    plain = codec(bits, 96, 64, reorder=False, search=False)
    without = plain.decode(plain.encode(x), mx.float32)
    lost = [mx.square(a - x).mean(axis=(0, 2, 3)) for a in (with_it, without)]
    assert (lost[0] <= lost[1] * (1 + 1e-6)).all().item()


def test_the_given_factor_bounds_the_search() -> None:
    fitted = codec(fit=64, reorder=False, clip=0.6).fit(normal(1, 2, 64, 128))
    assert set(np.unique(np.array(fitted["clip"]))) <= {np.float32(0.6)}
    assert min(CLIP_FACTORS) == 0.6


def two_scales() -> mx.array:
    return normal(1, 1, 256, 128, seed=2) * mx.where(mx.arange(128) % 2 == 0, 1.0, 10.0)


def test_order_by_range_saves_the_small_channels() -> None:
    x = two_scales()
    plain, sorted_ = codec(reorder=False, search=False), codec(fit=256, search=False)
    before = plain.decode(plain.encode(x), mx.float32)
    after = round_trip(sorted_, x)
    assert error(before[..., ::2], x[..., ::2]) > 20 * error(after[..., ::2], x[..., ::2])
    assert error(before, x) / error(after, x) >= 1.4


def test_order_by_middle_serves_channels_of_different_means() -> None:
    x = normal(1, 1, 256, 128, seed=3) + 3 * normal(1, 1, 1, 128, seed=4)
    plain, sorted_ = codec(reorder=False, search=False), codec(fit=256, search=False)
    before = error(plain.decode(plain.encode(x), mx.float32), x)
    assert error(round_trip(sorted_, x), x) < 0.5 * before


def test_constant_statistics_leave_the_order_alone() -> None:
    x = mx.broadcast_to(normal(1, 2, 64, 1), (1, 2, 64, 128))
    order = codec(fit=64).fit(x)["order"]
    assert mx.array_equal(order, mx.broadcast_to(mx.arange(128), order.shape)).item()
    assert channel_permutation(x[0, 0]).tolist() == list(range(128))


def test_every_head_has_an_order_of_its_own() -> None:
    x = two_scales()
    both = mx.concatenate([x, x[..., ::-1]], axis=1)
    order = np.array(codec(fit=256).fit(both)["order"])[0, :, 0]
    assert (np.sort(order, axis=-1) == np.arange(128)).all()
    assert (order[0] != order[1]).any()


def test_reordered_input_gives_the_same_products() -> None:
    x, q = normal(1, 1, 128, 128, seed=5), normal(1, 1, 4, 128, seed=6)
    mixed = mx.random.permutation(128, key=mx.random.key(7))
    made = codec(bits=4)
    scores = []
    for rows, query in ((x, q), (x[..., mixed], q[..., mixed])):
        fitted = made.fit(rows)
        scores.append(made.scores(query, {**made.encode_fitted(rows, fitted), **fitted}))
    assert mx.abs(scores[0] - scores[1]).max().item() < 1e-3


def test_sums_come_back_in_the_order_of_the_model() -> None:
    x, w = two_scales(), mx.softmax(normal(1, 1, 4, 256), axis=-1)
    made = codec(bits=8, fit=256)
    fitted = made.fit(x)
    packed = {**made.encode_fitted(x, fitted), **fitted}
    assert mx.abs(made.mix(w, packed) - w @ x).max().item() < 0.05
    assert mx.abs(made.mix(w, packed) - w @ made.decode(packed, mx.float32)).max().item() < 1e-4


# ---- free functions -------------------------------------------------------------------------


def test_a_permutation_and_its_inverse() -> None:
    x = two_scales()[0, 0]
    perm = channel_permutation(x)
    assert perm.dtype == mx.int32
    assert sorted(perm.tolist()) == list(range(128))
    assert mx.array_equal(
        apply_permutation(apply_permutation(x, perm), invert_permutation(perm)), x
    )


def test_codes_of_clipped_groups_take_the_best_factor() -> None:
    x = normal(64, 80, seed=8)
    codes, low, scale = clipped_group_quant(x, 2, 32)
    assert codes.dtype == mx.uint8
    assert codes.shape == (64, 3, 32)
    assert low.shape == scale.shape == (64, 3)
    back = clipped_group_dequant(codes, low, scale, 32, 80)
    plain = clipped_group_dequant(*clipped_group_quant(x, 2, 32, (1.0,)), 32, 80)
    assert error(back, x) < error(plain, x)
    assert mx.array_equal(back, skvq_round_trip(x, None, 2, 32)).item()


def test_a_round_trip_keeps_the_type_and_gains_from_the_order() -> None:
    x = two_scales()[0, 0].astype(mx.float16)
    with_it = skvq_round_trip(x, channel_permutation(x), 2, 32)
    assert with_it.dtype == mx.float16
    assert error(with_it, x) < error(skvq_round_trip(x, None, 2, 32), x)


def test_no_factor_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="alphas"):
        clipped_group_quant(normal(2, 32), 2, 32, ())


def test_sizes() -> None:
    assert skvq_compressed_bytes(1, 128, 2, 32) == 48
    assert skvq_fp16_bytes(3, 128) == 768
