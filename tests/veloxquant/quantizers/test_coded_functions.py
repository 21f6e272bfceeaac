"""The documented functions of gear, cachegen and kvtc on plain matrices."""

import math

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.quantizers import cachegen, gear, kvtc

ROWS = mx.random.normal((70, 48), key=mx.random.key(0))


def norm(x: mx.array) -> float:
    return float(mx.square(x.astype(mx.float32)).sum().item())


# ---- cachegen -------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_within_half_a_step(bits: int) -> None:
    stream = cachegen.quantize_to_codes(ROWS, bits)
    assert stream.codes.shape == (3, 32, 48)
    assert stream.codes.max().item() == (1 << bits) - 1
    back = cachegen.dequant_codes(stream)
    assert back.dtype == mx.float16
    assert back.shape == ROWS.shape
    assert mx.abs(back - ROWS).max().item() <= stream.scale.max().item() / 2 + 2e-3
    assert mx.array_equal(cachegen.cachegen_quant_dequant(ROWS, bits), back).item()


def test_leading_axes_are_matrices_of_their_own() -> None:
    both = mx.stack([ROWS, 2 * ROWS + 1])
    together = cachegen.quantize_to_codes_batched(both, 3)
    for i in range(2):
        alone = cachegen.quantize_to_codes(both[i], 3)
        assert mx.array_equal(together.codes[i], alone.codes).item()
        assert cachegen.entropy_coded_bytes_batched(together)[i] == cachegen.entropy_coded_bytes(
            alone
        )
        assert cachegen.fixed_width_bytes_batched(together)[i] == cachegen.fixed_width_bytes(alone)


def test_deltas_are_undone_by_sums() -> None:
    codes = cachegen.quantize_to_codes(ROWS, 4).codes.reshape(-1, 48)
    deltas = cachegen.token_delta(codes)
    assert mx.array_equal(mx.cumsum(deltas, axis=0), codes).item()


def test_entropy_of_known_distributions() -> None:
    assert cachegen.symbol_entropy_bits(mx.zeros(10)) == 0.0
    assert cachegen.symbol_entropy_bits(mx.arange(16)) == pytest.approx(4)
    assert cachegen.symbol_entropy_bits(mx.array([0, 0, 0, 1])) == pytest.approx(0.8113, abs=1e-4)


def test_coded_bytes_are_never_above_fixed_ones_and_correlation_pays() -> None:
    fixed = cachegen.quantize_to_codes(ROWS, 4)
    assert cachegen.fixed_width_bytes(fixed) == 70 * 48 // 2 + 4 * 3 * 48
    for use_delta in (True, False):
        for per_channel in (True, False):
            coded = cachegen.entropy_coded_bytes(fixed, use_delta, per_channel)
            assert coded <= cachegen.fixed_width_bytes(fixed)
    slow = cachegen.quantize_to_codes(mx.cumsum(ROWS, axis=0), 4, group_size=70)
    with_delta, without = (cachegen.entropy_coded_bytes(slow, d) for d in (True, False))
    assert with_delta < without


def test_bits_fall_with_depth() -> None:
    assert cachegen.layer_group_bits(6, 5) == [5, 5, 4, 4, 3, 3]
    assert cachegen.layer_group_bits(2, 4, 3) == [4, 3]
    assert cachegen.layer_group_bits(5, 2) == [2] * 5
    for n, groups in ((1, 1), (7, 3), (32, 4)):
        bits = cachegen.layer_group_bits(n, 8, groups)
        assert len(bits) == n
        assert bits == sorted(bits, reverse=True)
        assert len(set(bits)) == min(n, groups)
    with pytest.raises(ValueError, match="at least 1"):
        cachegen.layer_group_bits(0, 4)


# ---- gear -----------------------------------------------------------------------------------


def test_groups_run_along_the_named_axis() -> None:
    keys, _ = gear.quantize_base(ROWS, 2, axis="channel")
    values, base = gear.quantize_base(ROWS, 2, axis="token")
    assert keys.codes.shape == (3, 32, 48)
    assert values.codes.shape == (2, 32, 70)
    assert base.shape == ROWS.shape
    with pytest.raises(ValueError, match="axis"):
        gear.quantize_base(ROWS, 2, axis="rows")


@pytest.mark.parametrize("axis", ["token", "channel"])
def test_every_part_lowers_the_error(axis: str) -> None:
    errors = [
        norm(gear.gear_quant_dequant(ROWS, 2, rank, share, base_axis=axis) - ROWS)
        for rank, share in ((0, 0.0), (2, 0.0), (2, 0.05), (48, 0.05))
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3 * norm(ROWS)


def test_bytes_of_each_part() -> None:
    state = gear.gear_compress(ROWS, 2, 3, 0.01, base_axis="channel")
    assert gear.base_only_bytes(state) == 70 * 48 * 2 // 8 + 4 * 3 * 48
    wanted = 2 * 3 * (70 + 48) + 6 * math.ceil(0.01 * ROWS.size)
    assert gear.gear_bytes(state) - gear.base_only_bytes(state) == wanted
    assert state.rank == 3


def test_a_rank_by_energy_stays_where_it_pays() -> None:
    state = gear.gear_compress(ROWS)
    assert state.rank == 1
    lone = gear.gear_compress(ROWS[:1])
    assert lone.rank == 0
    assert lone.L is None
    left, right = gear.lowrank_error(ROWS, None, 0.5)
    assert left is not None
    assert right is not None
    assert norm(ROWS - left @ right) <= 0.5 * norm(ROWS)
    assert gear.lowrank_error(mx.zeros((4, 4)), None) == (None, None)


def test_outliers_are_the_largest_entries() -> None:
    place, value = gear.sparse_outliers(ROWS, 0.001)
    flat = np.array(ROWS).ravel()
    assert place is not None
    assert value is not None
    assert set(place.tolist()) == set(np.argsort(-np.abs(flat))[:4].tolist())
    np.testing.assert_allclose(np.array(value), flat[np.array(place)], rtol=1e-3)
    assert gear.sparse_outliers(ROWS, 0) == (None, None)


def test_a_batch_is_reconstructed_as_each_alone() -> None:
    states = [gear.gear_compress(x, 2, 2, 0.02) for x in (ROWS, ROWS * 3)]
    bases = [gear.quantize_base(x, 2)[1] for x in (ROWS, ROWS * 3)]
    parts = [mx.stack([getattr(s, n) for s in states]) for n in ("L", "R", "sp_idx", "sp_val")]
    together = gear.gear_reconstruct_batched(mx.stack(bases), *parts)
    for i in range(2):
        assert mx.array_equal(together[i], gear.gear_reconstruct(states[i], bases[i])).item()
        assert mx.abs(together[i] - gear.gear_reconstruct(states[i])).max().item() < 2e-2


# ---- kvtc -----------------------------------------------------------------------------------


def test_the_basis_is_orthonormal_and_projections_give_the_rows_back() -> None:
    both = mx.stack([ROWS, ROWS * 2])
    projected, basis, mean, variances = kvtc.kvtc_local_pca_batched(both)
    for i in range(2):
        v = np.array(basis[i])
        np.testing.assert_allclose(v.T @ v, np.eye(48), atol=1e-5)
        back = projected[i] @ basis[i].T + mean[i]
        assert mx.abs(back - both[i]).max().item() < 1e-4
        assert (np.diff(variances[i]) <= 0).all()


def test_the_error_falls_with_the_budget_to_nearly_nothing() -> None:
    errors = []
    for budget in (0, 40, 100, 200, 48 * 8):
        artifact = kvtc.kvtc_compress(ROWS, budget)
        assert artifact.bit_allocation.sum() <= budget
        assert artifact.n_survived == np.count_nonzero(artifact.bit_allocation)
        back = kvtc.kvtc_decompress(artifact)
        assert back.dtype == mx.float16
        errors.append(norm(back - ROWS))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4 * norm(ROWS)
    assert errors[0] == pytest.approx(norm(ROWS - ROWS.mean(axis=0)), rel=1e-3)


def test_coding_is_used_where_it_pays_and_changes_nothing() -> None:
    near = mx.concatenate([mx.zeros((400, 8)), mx.ones((3, 8)) * 5 + mx.arange(8)])
    coded = kvtc.kvtc_compress(near, 16)
    assert coded.is_entropy_coded
    assert kvtc.kvtc_fp16_bytes(coded) < kvtc.kvtc_pre_entropy_bytes(coded)
    noise = mx.random.uniform(shape=(300, 16), key=mx.random.key(4))
    plain = kvtc.kvtc_compress(noise, 48, (0, 3))
    assert not plain.is_entropy_coded
    assert kvtc.kvtc_fp16_bytes(plain) == kvtc.kvtc_pre_entropy_bytes(plain)
    for artifact, rows in ((coded, near), (plain, noise)):
        step = artifact.quant_scale.max() * math.sqrt(artifact.n_survived)
        assert mx.abs(kvtc.kvtc_decompress(artifact) - rows).max().item() <= step


def test_a_component_on_its_grid() -> None:
    codes, low, scale = kvtc.quantize_component(np.array([-1.0, 0.0, 2.0]), 2)
    assert codes.tolist() == [0, 1, 3]
    assert (low, scale) == (-1.0, 1.0)
    assert kvtc.quantize_component(np.full(4, 7.0), 3)[0].tolist() == [0] * 4
