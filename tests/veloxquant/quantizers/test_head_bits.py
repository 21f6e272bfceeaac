"""Widths by head: planes and tiles against plain formats, planned sizes, statistics, batches."""

import math
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.quantizers.adakv import (
    compute_head_attention_entropy,
    compute_head_norm_variance,
    quantize_head,
    quantize_heads_batched,
)
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.importance import block_sums, importance_of
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.head_bits import HeadBitsChannelSpec, HeadBitsTokenSpec, TilePlan

G, H, D = 32, 4, 80


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def codec(side: str, target: float = 2.5, choices=(2, 3, 4), heads: int = H, dim: int = D):
    common = (choices, target, heads, G)
    if side == "keys":
        return codec_for(HeadBitsChannelSpec(*common, 1, "norm_variance", 32), dim)
    return codec_for(HeadBitsTokenSpec(*common), dim)


def mixed_units(blocks: int, budget: int = 2, batch: int = 1, most: int = 2) -> mx.array:
    """Units (batch, H, blocks) whose sums over heads are the budget."""
    draw = np.random.default_rng(blocks)
    out = np.zeros((batch, H, blocks), dtype=np.uint32)
    for b in range(batch):
        for j in range(blocks):
            while out[b, :, j].sum() < budget:
                out[b, draw.choice(np.flatnonzero(out[b, :, j] < most)), j] += 1
    return mx.array(out)


def plain(side: str, bits: int, x: mx.array) -> mx.array:
    spec = AffineChannelSpec(bits, G) if side == "keys" else AffineTokenSpec(bits, G)
    made = codec_for(spec, x.shape[-1])
    return made.decode(made.encode(x), mx.float32)


sides = pytest.mark.parametrize("side", ["keys", "values"])


@sides
@pytest.mark.parametrize("choices", [(2, 3, 4), (1, 3, 5), (4, 6, 8), (2, 5, 8)])
def test_every_head_and_block_has_its_width(side: str, choices: tuple[int, int, int]) -> None:
    x = normal(2, H, 4 * G, D)
    made = codec(side, (choices[0] + choices[1]) / 2, choices)
    units = mixed_units(4, batch=2)
    got = made.decode(made.encode_units(x, units, 0), mx.float32)
    chosen = mx.repeat(units, G, axis=-1)[..., None]
    for number, bits in enumerate(choices):
        lost = mx.where(chosen == number, mx.abs(got - plain(side, bits, x)), 0.0)
        assert lost.max().item() < 1e-5


@sides
def test_products_are_those_of_the_unpacked_rows(side: str) -> None:
    x, units = normal(2, H, 4 * G, D), mixed_units(4, batch=2)
    made = codec(side)
    packed = made.encode_units(x, units, 0)
    rows = made.decode(packed, mx.float32)
    q, w = normal(2, H, 3, D, seed=1), normal(2, H, 3, 4 * G, seed=2)
    assert mx.abs(made.scores(q, packed) - q @ rows.swapaxes(-1, -2)).max().item() < 1e-3
    assert mx.abs(made.mix(w, packed) - w @ rows).max().item() < 1e-3


@sides
def test_later_blocks_read_alone(side: str) -> None:
    """A range of blocks is unpacked without those before it, in a layer of 3 tiles in 2 blocks."""
    made = codec(side, 2.375)
    assert [made.spec.tiles.after(n) for n in range(5)] == [0, 1, 3, 4, 6]
    x, packed = normal(1, H, 4 * G, D), {}
    units = mx.concatenate(
        [mixed_units(4, n)[..., j : j + 1] for j, n in enumerate((1, 2, 1, 2))], -1
    )
    packed = made.encode_units(x, units, 0)
    part = {}
    for name, array in packed.items():
        place = made.axes.get(name)
        if place is not None:
            index = [slice(None)] * array.ndim
            index[place.axis] = slice(place.at(G), place.at(3 * G))
            part[name] = array[tuple(index)]
    whole = made.decode(packed, mx.float32)[:, :, G : 3 * G]
    assert mx.array_equal(made.decode(part, mx.float32), whole).item()
    both = [made.encode_units(x[:, :, :G], units[..., :1], 0),
            made.encode_units(x[:, :, G:], units[..., 1:], 1)]  # fmt: skip
    for name, array in packed.items():
        joined = mx.concatenate([p[name] for p in both], axis=made.axes[name].axis)
        assert mx.array_equal(joined, array).item()


def test_room_that_is_not_used_yet_gives_zeros() -> None:
    x, units = normal(1, H, 4 * G, D), mixed_units(4)
    for side in ("keys", "values"):
        made = codec(side)
        packed = made.encode_units(x, units, 0)
        wide = {}
        for name, array in packed.items():
            axis = made.axes[name].axis
            wide[name] = mx.concatenate([array, mx.zeros_like(array)], axis=axis)
        rows = made.decode(wide, mx.float32)
        assert mx.array_equal(rows[:, :, : 4 * G], made.decode(packed, mx.float32)).item()
        assert not mx.abs(rows[:, :, 4 * G :]).max().item()


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("target", [2.0, 2.3, 2.5, 3.1, 4.0])
def test_planned_tiles_keep_the_mean(heads: int, target: float) -> None:
    plan = codec("keys", target, heads=heads).spec.tiles
    assert plan.after(64) / 64 / heads == pytest.approx(target - 2, abs=1 / heads / 64 + 1e-9)
    steps = np.diff([plan.after(n) for n in range(65)])
    assert steps.max() - steps.min() <= 1


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_uneven_widths_keep_the_mean_as_well(heads: int) -> None:
    plan = codec("keys", 2.5, (1, 4, 6), heads).spec.tiles
    assert plan.after(200) / 200 / heads == pytest.approx(1.5, abs=0.05)


def planned_block_by_block(
    rate: Fraction, heads: int, units: tuple[int, int], blocks: int
) -> list[int]:
    """The definition of a plan, walked through."""
    middle, most = units
    sums = {i * middle + j * most for i in range(heads + 1) for j in range(heads + 1 - i)}
    after = [0]
    for n in range(1, blocks + 1):
        room = math.floor(rate * n) - after[-1]
        after.append(after[-1] + max(s for s in sums if s <= room))
    return after


@given(
    st.lists(st.integers(1, 8), min_size=3, max_size=3, unique=True).map(sorted),
    st.floats(0, 1),
    st.integers(1, 9),
    st.sampled_from([7, 10, 100, 10_000]),
)
@settings(max_examples=60, deadline=None)
def test_a_plan_is_its_definition_at_any_length(
    choices: list[int], share: float, heads: int, digits: int
) -> None:
    low, middle, high = choices
    unit = math.gcd(middle - low, high - low)
    units = (middle - low) // unit, (high - low) // unit
    rate = Fraction((high - low) * share).limit_denominator(digits) * heads / unit
    plan = TilePlan(rate, heads, units)
    walked = planned_block_by_block(rate, heads, units, 300)
    assert [plan.after(n) for n in range(301)] == walked


def test_a_plan_repeats_as_its_definition_does() -> None:
    """Past several periods, of numbers that heads cannot make and rates of long fractions."""
    for rate, heads, units in (
        (Fraction(7, 3), 2, (3, 5)), (Fraction(1999, 1000), 1, (2, 7)),
        (Fraction(97, 31), 3, (2, 7)),
        (Fraction(0), 4, (1, 2)), (Fraction(8), 4, (1, 2)), (Fraction(9), 4, (1, 2)),
    ):  # fmt: skip
        plan = TilePlan(rate, heads, units)
        walked = planned_block_by_block(rate, heads, units, 9_000)
        assert [plan.after(n) for n in range(9_001)] == walked


def test_a_long_context_is_planned_without_its_blocks() -> None:
    spec = codec("keys", 2.3337, (1, 3, 8), 7).spec
    blocks = 10**12
    assert spec.tiles.after(blocks) <= spec.tiles.rate * blocks < spec.tiles.after(blocks) + 7
    assert len(spec.tiles._after) < 200_000


def test_bytes_are_those_of_the_arrays() -> None:
    x = normal(1, H, 4 * G, D).astype(mx.bfloat16)
    for side in ("keys", "values"):
        made = codec(side)
        held = sum(a.nbytes for a in made.encode(x).values())
        assert H * made.spec.nbytes(4 * G, D, 2) == held


# ---- statistics -----------------------------------------------------------------------------


def test_importance_is_the_relative_variance_of_norms_without_the_first_tokens() -> None:
    x = normal(2, 3, 4 * G, D) * (1 + mx.arange(3)[:, None, None])
    x = mx.where(mx.arange(4 * G)[:, None] < 4, 1_000.0, x)
    sums = mx.cumsum(block_sums(x, G, "norm_variance", 32, 0), axis=2)
    got = np.array(importance_of(sums[:, :, -1:], mx.array([4]), G, "norm_variance"))[..., 0]
    norms = np.linalg.norm(np.array(x, dtype=np.float64)[:, :, 4:], axis=-1)
    assert np.allclose(got, norms.var(axis=-1) / norms.mean(axis=-1) ** 2, rtol=1e-3)


def test_heads_of_wavering_norms_get_more_bits() -> None:
    waver = mx.array([0.0, 0.2, 0.8, 0.0])[:, None, None]
    x = normal(1, H, 4 * G, D) * (1 + waver * normal(1, H, 4 * G, 1, seed=1))
    units = np.array(codec("keys").encode(x)["n"] & 255)[0]
    assert (units[2] >= 1).all()
    assert (units[[0, 3]].sum(axis=0) <= units[[1, 2]].sum(axis=0)).all()
    assert (units.sum(axis=0) == 2).all()


def test_widths_follow_statistics_every_interval_only() -> None:
    spec = HeadBitsChannelSpec((2, 3, 4), 2.5, H, G, 4, "norm_variance", 32)
    x = normal(1, H, 8 * G, D) * (1 + normal(1, H, 8 * G, 1, seed=3))
    units = np.array(codec_for(spec, D).encode(x)["n"] & 255)[0]
    assert (units[:, :4] == units[:, :1]).all()
    assert (units[:, 4:] == units[:, 4:5]).all()


# ---- free functions -------------------------------------------------------------------------


def test_importances_of_plain_arrays() -> None:
    keys = normal(2, 3, 64, D).astype(mx.float16)
    variance = compute_head_norm_variance(keys)
    norms = np.linalg.norm(np.array(keys, dtype=np.float64), axis=-1)
    assert np.allclose(np.array(variance), norms.var(axis=-1).mean(axis=0), rtol=1e-3)
    flat = mx.zeros((1, 1, 64, D))
    peaked = mx.eye(64, D)[None, None] * 100
    entropy = [compute_head_attention_entropy(k, 16).item() for k in (flat, peaked)]
    assert entropy == pytest.approx([1.0, 0.0], abs=1e-4)
    assert compute_head_attention_entropy(keys).shape == (3,)
    assert compute_head_attention_entropy(keys, 1_000).shape == (3,)


def test_round_trips_of_plain_arrays() -> None:
    keys = normal(1, 3, 70, D)
    both = quantize_heads_batched(keys, [2, 4, 3])
    assert both.shape == keys.shape
    errors = [mx.square(both - keys)[:, h].mean().item() for h in range(3)]
    assert errors[0] > errors[2] > errors[1]
    alone = quantize_head(keys[0, 1].astype(mx.bfloat16), 4)
    assert alone.dtype == mx.bfloat16
    assert mx.square(alone.astype(mx.float32) - keys[0, 1]).mean().item() < 2 * errors[1]
    with pytest.raises(ValueError, match="3 heads"):
        quantize_heads_batched(keys, [2, 3])
