"""Anchors and residuals on plain matrices."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.quantizers.anchorkv import (
    ResidualCodec,
    allocate_residual_budget,
    anchorkv_budget_slots,
    assign_and_project,
    key_value_utility,
    pack_codes,
    select_anchors,
    unpack_codes,
)


def rows(n: int, d: int = 64, seed: int = 1) -> mx.array:
    return mx.random.normal((n, d), key=mx.random.key(seed))


def test_the_worked_example() -> None:
    found = assign_and_project(mx.array([[1.0, 1.0], [2.0, 1.0]]), mx.array([0]))
    assert found.gamma.tolist() == pytest.approx([1.0, 1.5])
    assert mx.allclose(found.residual, mx.array([[0, 0], [0.5, -0.5]])).item()


def test_projections_are_orthogonal_and_shorten() -> None:
    x, at = rows(200), mx.array([3, 50, 120])
    found = assign_and_project(x, at)
    anchors = x[at][found.assign_idx]
    inner = mx.abs((found.residual * anchors).sum(axis=-1))
    lengths = mx.linalg.norm(x, axis=-1) * mx.linalg.norm(anchors, axis=-1)
    assert (inner <= 1e-3 * lengths).all().item()
    assert (mx.linalg.norm(found.residual, axis=-1) <= mx.linalg.norm(x, axis=-1)).all().item()
    assert mx.array_equal(found.residual[at], mx.zeros((3, 64))).item()
    assert found.assign_idx[at].tolist() == [0, 1, 2]
    double = assign_and_project(4 * x, at)
    assert mx.allclose(double.gamma, found.gamma).item()


def test_zero_rows_are_safe() -> None:
    found = assign_and_project(mx.zeros((5, 8)), mx.array([1, 2]))
    assert mx.isfinite(found.gamma).all().item()
    assert mx.abs(found.residual).max().item() == 0


@pytest.mark.parametrize(("k", "window"), [(8, 3), (20, 0), (4, 9), (100, 5)])
def test_anchors_hold_the_window_and_are_ascending(k: int, window: int) -> None:
    keys = rows(40)
    found = select_anchors(keys, k, window, 0.5, 7)
    assert found.shape == (min(k, 40),)
    places = found.tolist()
    assert places == sorted(set(places))
    newest = min(window, k, 40)
    assert places[len(places) - newest :] == list(range(40 - newest, 40))
    assert mx.array_equal(found, select_anchors(keys, k, window, 0.5, 7)).item()
    if k < 40 and window < k:
        assert not mx.array_equal(found, select_anchors(keys, k, window, 0.0, 8)).item()


def test_residuals_come_back() -> None:
    x = rows(300, 128)
    lost = []
    for bits in (1, 2, 3, 4):
        codec = ResidualCodec(128, 42, bits)
        codes, scale = codec.encode(x)
        assert codes.dtype == mx.uint8
        assert scale.dtype == mx.float16
        assert codec.bytes_per_residual == 16 * bits + 2
        lost.append(mx.square(codec.decode(codes, scale) - x).mean().item())
    assert lost == sorted(lost, reverse=True)
    assert lost[1] < 0.25
    assert mx.abs(ResidualCodec(64, 1).decode(*ResidualCodec(64, 1).encode(mx.zeros((2, 64))))
                  ).max().item() == 0  # fmt: skip
    with pytest.raises(ValueError, match="bits=5"):
        ResidualCodec(64, 1, 5)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("d", [5, 64])
def test_packing_is_lossless(bits: int, d: int) -> None:
    codes = np.random.default_rng(1).integers(0, 1 << bits, (9, d)).astype(np.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (9, -(-d * bits // 8))
    assert np.array_equal(unpack_codes(packed, d, bits), codes)


def test_the_first_code_is_in_the_highest_bits() -> None:
    assert pack_codes(np.array([[3, 0, 1, 2]])).tolist() == [[0b11000110]]


def test_worth_follows_attention_and_error() -> None:
    keys, values = rows(30), rows(30, seed=2)
    zero = mx.zeros_like(keys)
    residual = mx.where(mx.arange(30)[:, None] == 7, rows(30, seed=3), 0.0)
    u_key, u_value = key_value_utility(rows(4, seed=4), keys, values, residual, zero)
    assert mx.argmax(u_key).item() == 7
    assert (u_key > 0).sum().item() == 1
    assert mx.abs(u_value).max().item() == 0


def test_the_budget_goes_to_the_best_of_all_heads() -> None:
    masks = allocate_residual_budget([mx.array([5.0, 1.0, 3.0]), mx.array([4.0, 2.0])], 3)
    assert [mask.tolist() for mask in masks] == [[True, False, True], [True, False]]
    assert allocate_residual_budget([], 4) == []


def test_slots_of_a_budget() -> None:
    assert anchorkv_budget_slots(1024, 128, 8, 0.05, 68) == (26214 - 4096 - 6096) // 68
    assert anchorkv_budget_slots(100, 128, 50, 0.05, 68) == 0
