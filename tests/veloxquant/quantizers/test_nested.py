"""Nested grids: every code, the integer formula, and what stays exact."""

import mlx.core as mx
import pytest

from veloxquant.quantizers.affine import affine_decode, affine_encode
from veloxquant.quantizers.nested import recode, recode_along, renumber


def test_the_worked_example() -> None:
    codes = mx.array([0, 8, 9, 127, 128, 200, 255])
    four = renumber(codes, 8, 4)
    assert four.tolist() == [0, 0, 1, 7, 8, 12, 15]
    assert renumber(four, 4, 2).tolist() == [0, 0, 0, 1, 2, 2, 3]


def test_all_codes_round_half_up() -> None:
    codes = mx.arange(256)
    assert renumber(codes, 8, 4).tolist() == [(c + 8) // 17 for c in range(256)]
    assert renumber(mx.arange(16), 4, 2).tolist() == [(c + 2) // 5 for c in range(16)]


@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 2), (2, 1), (6, 3), (3, 1)])
def test_widening_a_nested_code_and_narrowing_it_again_changes_nothing(old: int, new: int) -> None:
    codes = mx.arange(1 << new)
    wide = renumber(codes, new, old)
    step = ((1 << old) - 1) // ((1 << new) - 1)
    assert wide.tolist() == [c * step for c in range(1 << new)]
    assert renumber(wide, old, new).tolist() == codes.tolist()


def test_narrowed_rows_lie_on_the_wider_grid() -> None:
    x = mx.random.normal((3, 5, 64), key=mx.random.key(1))
    eight = affine_encode(x, 8, 32, mx.float32)
    for widths in ((8, 4), (8, 4, 2)):
        packed = recode_along(eight, widths)
        rows = affine_decode(packed, widths[-1], 32, mx.float32).reshape(3, 5, 2, 32)
        code = (rows - eight["b"][..., None]) / eight["s"][..., None]
        assert mx.abs(code - mx.round(code)).max().item() < 1e-3
        assert mx.array_equal(packed["b"], eight["b"]).item()


def test_narrowing_in_two_steps_is_coding_at_once() -> None:
    """512,000 normal elements, not one code differs."""
    x = mx.random.normal((8000, 64), key=mx.random.key(2))
    eight = affine_encode(x, 8, 32, mx.float32)
    two = recode_along(eight, (8, 4, 2))
    groups = x.reshape(8000, 2, 32)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    fine = mx.floor((groups - low) / (high - low) * 255 + 0.5)
    direct = mx.floor(mx.floor(fine / 17 + 0.5) / 5 + 0.5)
    rows = affine_decode(two, 2, 32, mx.float32).reshape(8000, 2, 32)
    codes = mx.round((rows - low) / (high - low) * 3)
    differ = (codes != direct).sum().item()
    assert differ <= 5  # codes on a tie of the 8-bit grid, where fp32 decides


def test_equal_widths_are_left_alone() -> None:
    packed = affine_encode(mx.random.normal((2, 32)), 4, 32, mx.float16)
    assert recode(packed, 4, 4) is packed
