"""One row that goes in a decoding step is merged as one of many is."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.cache.merging import Losers, Merger, merge, merge_one, nearest
from veloxquant.cache.selection import pick_rows


def draw(shape: tuple[int, ...], seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def without(lost: list[list[int]], n: int) -> mx.array:
    return mx.array([[[i for i in range(n) if i != one] for one in heads] for heads in lost])


def half_open(losers: Losers, probability: mx.array) -> mx.array:
    """A gate that depends on what it is shown."""
    return ((probability * 7 + losers.places) % 1.0 < 0.6).astype(mx.float32)


def turned(lost: mx.array, losers: Losers, target: mx.array) -> mx.array:
    return lost + 0.01 * (target - losers.places)[..., None]


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(3, 40), sink=st.integers(0, 1), dtype=st.sampled_from(["float32", "float16"]),
    mode=st.sampled_from(["sim_weighted", "mean", "sequential"]), gate=st.booleans(),
    turn=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_one_loser_is_merged_as_among_many(
    n: int, sink: int, dtype: str, mode: Any, gate: bool, turn: bool, seed: int
) -> None:
    keys = draw((2, 2, n, 16), seed, getattr(mx, dtype))
    values = draw((2, 2, n, 8), seed + 1, getattr(mx, dtype))
    scores = mx.abs(draw((2, 2, n), seed + 2))
    places = [[(seed + 3 * b + 5 * h) % (n - 1 - sink) + sink for h in (0, 1)] for b in (0, 1)]
    keep = without(places, n).astype(mx.int32)
    shown = half_open if gate else lambda _, p: mx.ones(p.shape)
    how = Merger(mode, sink, shown, turned if turn else None)
    many, one = merge(keys, values, scores, keep, how), merge_one(keys, values, scores, keep, how)
    at = one.slots[..., None]
    old = pick_rows(values, keep)
    got = mx.put_along_axis(old, mx.broadcast_to(at, one.values.shape), one.values, axis=2)
    near = 1e-5 if dtype == "float32" else 4e-3
    assert mx.abs(got - many.values).max().item() < near
    total = mx.take_along_axis(scores, keep, axis=-1)
    total = mx.put_along_axis(total, one.slots, one.scores, axis=-1)
    assert mx.abs(total - many.scores).max().item() < 1e-5
    changed = mx.zeros(keep.shape, dtype=mx.bool_)
    changed = mx.put_along_axis(changed, one.slots, one.changed, axis=-1)
    assert mx.array_equal(changed, many.changed)
    assert (one.keys is not None) == (turn and mode != "sequential")
    if one.keys is not None:
        got = mx.put_along_axis(
            pick_rows(keys, keep), mx.broadcast_to(at, one.keys.shape), one.keys, axis=2
        )
        assert mx.abs(got - many.keys).max().item() < near


@pytest.mark.parametrize("lost", [2, 5, 8])
def test_the_nearest_is_never_a_sink_nor_the_row_itself(lost: int) -> None:
    keys = mx.ones((1, 1, 10, 4))
    keep = without([[lost]], 10).astype(mx.int32)
    values, scores = draw((1, 1, 10, 4), 1), mx.ones((1, 1, 10))
    how = Merger("mean", 2, lambda _, p: mx.ones(p.shape))
    assert merge_one(keys, values, scores, keep, how).slots.tolist() == [[[2]]]
    kept, gone = pick_rows(keys, keep), keys[:, :, lost : lost + 1]
    assert nearest(kept, gone, 2)[0].tolist() == [[[2]]]
