"""Documented functions of svdq, palu, xkv, xquant and minicache."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.quantizers import minicache, palu, svdq, xkv, xquant


def decaying(rows: int = 128, dim: int = 32, seed: int = 0) -> mx.array:
    draw = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(draw.standard_normal((dim, dim)))
    x = draw.standard_normal((rows, dim)) / np.arange(1, dim + 1)
    return mx.array((x @ turn + 2).astype(np.float32))


def lost(got: mx.array, wanted: mx.array) -> float:
    a, b = (np.array(x.astype(mx.float32), dtype=np.float64) for x in (got, wanted))
    return float(np.square(a - b).sum() / np.square(b - b.mean(axis=0)).sum())


# ---- svdq -----------------------------------------------------------------------------------


def test_svdq_full_rank_gives_the_keys() -> None:
    keys = decaying()
    latents, basis, mean, s = svdq.svd_compress_keys(keys, rank=32)
    assert latents.shape == (128, 32)
    assert s.tolist() == sorted(s.tolist(), reverse=True)
    assert lost(svdq.reconstruct_keys(latents, basis, mean), keys) < 1e-5
    mixed = svdq.quantize_latents_mixed(latents, s, (8,) * 8)
    assert lost(svdq.reconstruct_keys(mixed, basis, mean), keys) < 1e-4


def test_svdq_rank_holds_the_energy() -> None:
    keys = decaying()
    ranks = [svdq.svd_compress_keys(keys, None, e)[1].shape[1] for e in (0.5, 0.9, 0.99, 1.0)]
    assert ranks == sorted(ranks)
    assert ranks[-1] == 32
    _, _, _, s = svdq.svd_compress_keys(keys, None, 0.9)
    whole = svdq.svd_compress_keys(keys, 32)[3]
    share = (mx.square(s).sum() / mx.square(whole).sum()).item()
    assert share >= 0.9


def test_svdq_heads_have_bases_of_their_own() -> None:
    keys = mx.stack([decaying(seed=i) for i in range(3)])
    _, bases, means, _ = svdq.svd_compress_keys_batched(keys, rank=32)
    out = svdq.project_quantize_reconstruct_batched(keys, bases, means, [(8, 8)] * 3, 32)
    assert out.dtype == mx.float16
    assert all(lost(a, b) < 1e-4 for a, b in zip(out, keys, strict=True))


def test_svdq_schedules() -> None:
    assert svdq.equivalent_bit_width(128) == 2.0
    assert svdq.equivalent_bit_width(64, (4, 4, 2, 0, 0, 0, 0, 0)) == 1.25
    assert svdq.min_safe_rank() == 32
    assert svdq.latent_group_slices(3) == [(0, 1), (1, 2), (2, 3)]


# ---- palu -----------------------------------------------------------------------------------


def test_palu_groups_cover_every_head_once() -> None:
    assert palu.head_group_bounds(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert palu.head_group_bounds(2, 9) == [(0, 1), (1, 2)]


def test_palu_latents_there_and_back() -> None:
    heads = mx.stack([decaying(seed=i) for i in range(2)])
    basis, mean, s = palu.group_head_svd(heads, rank=32)
    latents = palu.project_to_latent(heads[0], basis, mean)
    assert lost(palu.reconstruct_from_latent(latents, basis, mean), heads[0]) < 1e-5
    errors = [
        lost(palu.quantize_latent(latents, s, high, low, 0.25, 32), latents)
        for high, low in ((2, 2), (4, 2), (8, 8), (16, 16))
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6
    wide, means, values = (mx.stack([a, a]) for a in (basis, mean, s))
    many = palu.project_to_latent_batched(heads, wide, means)
    rounded = palu.quantize_latent_batched(many, values, 8, 8, 0.5, 32)
    back = palu.reconstruct_from_latent_batched(rounded, wide, means, mx.float32)
    assert back.dtype == mx.float32
    assert lost(back.reshape(-1, 32), heads.reshape(-1, 32)) < 1e-3


# ---- xkv ------------------------------------------------------------------------------------


def test_xkv_one_basis_serves_layers_that_are_alike() -> None:
    one = decaying()
    basis, mean, _ = xkv.joint_svd_compress([one, one], rank=32)
    latents = xkv.project_into_shared_basis(one, basis, mean)
    assert lost(xkv.reconstruct_from_shared_basis(latents, basis, mean), one) < 1e-5
    errors = [lost(xkv.quantize_latents_uniform(latents, bits), latents) for bits in (2, 4, 8)]
    assert errors == sorted(errors, reverse=True)
    many = mx.broadcast_to(one, (2, 3, *one.shape))
    out = xkv.project_quantize_reconstruct_batched(many, basis, mean, 8)
    assert lost(out[1, 2], one) < 1e-3


def test_xkv_groups() -> None:
    assert xkv.pair_layers_grouped(5, 2) == [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2), (0, 2, 1)]


# ---- xquant ---------------------------------------------------------------------------------


def test_xquant_codes_are_within_half_a_step() -> None:
    x = decaying(70)
    codes, params = xquant.quantize_codes(x, 4)
    assert codes.shape == (3, 32, 32)
    away = mx.abs(xquant.dequant_with_params_batched(codes, params, mx.float32) - x)
    assert (away.max() <= params.scale.max() / 2 + 1e-5).item()


def test_xquant_maps_of_a_layer_lose_what_it_loses() -> None:
    x = decaying(64)
    codes, params = xquant.quantize_codes(x, 2)
    own = lost(xquant.dequant_with_params(codes, params), x)
    for factor in (3.0, -2.0):
        other = factor * x + 5
        read = xquant.compute_reuse_params(other, codes, 2)
        assert lost(xquant.dequant_with_params(codes, read), other) <= own + 1e-3


def test_xquant_residuals_never_hurt() -> None:
    x, other = decaying(64, seed=1), decaying(64, seed=2)
    codes, _ = xquant.quantize_codes(x, 2)
    got = xquant.dequant_with_params(codes, xquant.compute_reuse_params(other, codes, 2))
    errors = [lost(got, other)] + [
        lost(got + xquant.quantize_residual(other, got, bits), other) for bits in (1, 2, 4, 8)
    ]
    assert errors == sorted(errors, reverse=True)
    with pytest.raises(ValueError, match="bits=0"):
        xquant.quantize_residual(other, got, 0)


def test_xquant_pairs() -> None:
    wanted = [("anchor", 0), ("reuse", 0), ("anchor", 1), ("reuse", 1), ("anchor", 2)]
    assert xquant.pair_layers(5, 2) == wanted


# ---- minicache ------------------------------------------------------------------------------


def test_minicache_pairs_deep_layers() -> None:
    wanted = [("primary", 0), ("primary", 1), ("primary", 2), ("primary", 3), ("merge", 3)]
    assert minicache.pair_layers_depth(5) == wanted


def test_minicache_ends_of_the_arc_are_the_layers() -> None:
    a, b = (minicache.to_mag_dir(decaying(seed=i) - 2)[1] for i in (1, 2))
    for t, wanted in ((0.0, a), (1.0, b)):
        assert mx.abs(minicache.slerp(a, b, t) - wanted).max().item() < 1e-3
    there, back = minicache.slerp(a, b, 0.3), minicache.slerp(b, a, 0.7)
    assert mx.abs(there - back).max().item() < 1e-3
    assert mx.abs(mx.linalg.norm(there, axis=-1) - 1).max().item() < 1e-5


def test_minicache_odd_vectors_stay_finite() -> None:
    unit = mx.eye(4)[:1]
    for other in (unit, -unit, mx.zeros_like(unit)):
        out = minicache.merge_pair(unit, other, -1.0)
        for which in ("primary", "merge"):
            assert mx.isfinite(minicache.reconstruct_layer(out, which)).all().item()


def test_minicache_keeps_unlike_tokens() -> None:
    x = decaying() - 2
    y = mx.concatenate([x[:100] * 2, decaying(28, seed=9) - 2], axis=0)
    out = minicache.merge_pair(x, y, 0.9)
    assert not out.retained[:100].any().item()
    assert out.full_merge.shape[0] == out.retained.sum().item() > 10
    for which, rows in (("primary", x), ("merge", y)):
        got = minicache.reconstruct_layer(out, which)
        assert lost(got[:100], rows[:100]) < 1e-4
    whole = minicache.merge_pair(x, y, 1.0)
    assert lost(minicache.reconstruct_layer(whole, "merge"), y) < 1e-6
    same = minicache.merge_similarity(x, 3 * x)
    assert same == pytest.approx({"cosine": 1.0, "magnitude_ratio": 1 / 3}, abs=1e-3)
    with pytest.raises(ValueError, match="which="):
        minicache.reconstruct_layer(out, "both")


def test_similarity_of_layers_is_that_of_their_rows() -> None:
    x = decaying()
    assert xquant.cross_layer_similarity(x, x) == pytest.approx({"mse": 0.0, "cosine": 1.0})
    shifted = xquant.cross_layer_similarity(x, -2 * x)
    assert shifted["cosine"] == pytest.approx(-1.0)
    assert shifted["mse"] == pytest.approx(9 * float((x * x).mean().item()), rel=1e-5)
    assert xquant.cross_layer_similarity(mx.zeros((3, 4)), mx.zeros((3, 4)))["cosine"] == 0.0
