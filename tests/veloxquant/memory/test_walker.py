from typing import Any

import mlx.core as mx
import mlx.nn as nn

from veloxquant.memory.walker import arrays_in, bytes_of


class Slotted:
    __slots__ = ("array", "unset")

    def __init__(self, array: mx.array) -> None:
        self.array = array


class Child(Slotted):
    def __init__(self, array: mx.array, more: Any) -> None:
        super().__init__(array)
        self.more = more


def ones(n: int) -> mx.array:
    return mx.ones((n,))


def test_every_array_is_found_once_wherever_it_hides() -> None:
    shared = ones(1)
    root = Child(ones(2), {"a": [shared, (ones(4), shared)], "b": {3}, "c": Slotted(ones(8))})
    root.more["self"] = root
    assert sorted(array.size for array in arrays_in([root, shared])) == [1, 2, 4, 8]


def test_weights_and_functions_are_not_cache() -> None:
    held = ones(1)

    def closure() -> mx.array:
        return held

    assert arrays_in([{"model": nn.Linear(2, 2), "call": closure, "type": mx.array}]) == []


def test_a_repeated_axis_counts_once() -> None:
    wide = mx.broadcast_to(mx.array(1.0), (4, 1000))
    rows = mx.broadcast_to(ones(8)[None], (100, 8))
    mx.eval(wide, rows)
    assert bytes_of([wide]) == 4
    assert bytes_of([rows]) == 32
    assert bytes_of([mx.zeros((4, 8), dtype=mx.bfloat16)]) == 64
    assert bytes_of([mx.zeros((0, 8))]) == 0
