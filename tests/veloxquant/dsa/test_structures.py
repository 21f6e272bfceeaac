import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.core.exceptions import CyclicPipelineError
from veloxquant.dsa.avl_tree import AVLNode, AVLTree, VoronoiTree
from veloxquant.dsa.bit_pack import BitPackBuffer
from veloxquant.dsa.dag import QuantizationGraph
from veloxquant.dsa.heap import MaxHeap, SortedChannelIndex
from veloxquant.dsa.ring_buffer import RingBuffer

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 2, 3, 4]), st.lists(st.integers(0, 15), max_size=40))
def test_packed_integers_come_back(b: int, codes: list[int]) -> None:
    small = np.array([c % (1 << b) for c in codes], dtype=np.int64)
    packed = BitPackBuffer(b).pack(small)
    assert packed.dtype == np.uint8
    assert len(packed) == -(-len(codes) * b // 8)
    assert BitPackBuffer(b).unpack(packed, len(codes)).tolist() == small.tolist()


def test_packing_refuses_what_does_not_fit() -> None:
    assert BitPackBuffer(3).pack(np.arange(8)).tolist() == [0x88, 0xC6, 0xFA]
    for bad in ([4], [-1]):
        with pytest.raises(ValueError, match="fit"):
            BitPackBuffer(2).pack(np.array(bad))
    with pytest.raises(ValueError, match="hold"):
        BitPackBuffer(2).unpack(np.zeros(1, np.uint8), 5)
    for width in (0, 5, True):
        with pytest.raises(ValueError, match="widths"):
            BitPackBuffer(width)


def test_graph_orders_stages_and_finds_the_longest_way() -> None:
    a, b, c, d = object(), object(), object(), object()
    graph = QuantizationGraph()
    assert graph.critical_path() == []
    for edge in ((a, d), (a, b), (b, c), (c, d), (a, b)):
        graph.add_edge(*edge)
    assert graph.topological_sort() == [a, b, c, d]
    assert graph.critical_path() == [a, b, c, d]
    assert not graph.has_cycle()
    graph.add_edge(d, b)
    assert graph.has_cycle()
    with pytest.raises(CyclicPipelineError, match="circle"):
        graph.topological_sort()


def test_graph_tells_equal_objects_apart() -> None:
    graph, first, second = QuantizationGraph(), [1], [1]
    graph.add_node(first)
    graph.add_node(first)
    graph.add_edge(second, first)
    order = graph.topological_sort()
    assert len(order) == 2
    assert order[0] is second


@settings(max_examples=40, deadline=None)
@given(st.lists(NUMBERS, max_size=40))
def test_heap_gives_the_largest_first(numbers: list[float]) -> None:
    heap: MaxHeap[int] = MaxHeap()
    for i, number in enumerate(numbers):
        heap.push(number, i)
    if numbers:
        assert heap.peek()[0] == max(numbers)
    popped = [heap.pop() for _ in numbers]
    wanted = sorted(range(len(numbers)), key=lambda i: (-numbers[i], i))
    assert [value for _, value in popped] == wanted
    with pytest.raises(IndexError):
        heap.pop()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), NUMBERS), min_size=1, max_size=200))
def test_channels_are_unique_and_the_index_stays_small(steps: list[tuple[int, float]]) -> None:
    index, truth = SortedChannelIndex(), {}
    for channel, magnitude in steps:
        index.insert(channel, magnitude)
        index.insert(channel, magnitude)
        truth[channel] = magnitude
        wanted = sorted(truth, key=lambda c: (-truth[c], c))
        assert index.top_k(3) == wanted[:3]
        assert index.top_k(10) == wanted
    assert len(index._heap) <= 64
    with pytest.raises(KeyError):
        index.update(99, 1.0)


def test_ring_gives_up_the_oldest() -> None:
    ring: RingBuffer[int] = RingBuffer(3)
    assert [ring.append(i) for i in range(5)] == [None, None, None, 0, 1]
    assert (ring.to_list(), list(ring), ring[-1], ring[0], len(ring)) == (
        [2, 3, 4], [2, 3, 4], 4, 2, 3,
    )  # fmt: skip
    assert ring.is_full()
    with pytest.raises(IndexError):
        ring[3]
    rows: RingBuffer[mx.array] = RingBuffer(2)
    with pytest.raises(ValueError, match="empty"):
        rows.to_stacked()
    for i in range(3):
        rows.append(mx.full((2,), i))
    assert rows.to_stacked().tolist() == [[1, 1], [2, 2]]
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="capacity"):
            RingBuffer(bad)  # pyright: ignore[reportArgumentType]


def depth(node: AVLNode | None) -> int:
    if node is None:
        return 0
    left, right = depth(node.left), depth(node.right)
    assert abs(left - right) <= 1
    return 1 + max(left, right)


@settings(max_examples=40, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=80), NUMBERS)
def test_tree_is_balanced_and_finds_the_nearest(keys: list[float], query: float) -> None:
    tree = AVLTree()
    for i, key in enumerate(keys):
        tree.insert(key, i)
    assert depth(tree._root) <= 1.45 * math.log2(len(keys) + 2)
    key, value = tree.search_nearest(query)
    assert abs(key - query) == min(abs(k - query) for k in keys)
    assert keys[value] == key
    lo, hi = min(query, keys[0]), max(query, keys[0])
    inside = [i for i in range(len(keys)) if lo <= keys[i] <= hi]
    assert sorted(tree.range_query(lo, hi)) == inside


def test_of_two_as_near_the_tree_gives_the_lower() -> None:
    tree = AVLTree()
    for i, key in enumerate([3.0, 1.0, 5.0]):
        tree.insert(key, i)
    assert tree.search_nearest(2.0) == (1.0, 1)
    assert tree.search_nearest(4.0) == (3.0, 0)


@pytest.mark.parametrize("n", [1, 2, 16, 17, 200])
def test_nearest_centroid_by_scan_and_by_tree(n: int) -> None:
    centroids = np.random.default_rng(n).standard_normal(n).round(1)
    found = VoronoiTree()
    found.build(centroids)
    for value in np.linspace(-3, 3, 61):
        away = np.abs(centroids - value)
        index = found.nearest(float(value))
        assert away[index] == pytest.approx(away.min(), abs=1e-12)


def test_empty_trees_say_so() -> None:
    with pytest.raises(ValueError, match="empty"):
        AVLTree().search_nearest(0.0)
    with pytest.raises(ValueError, match="NaN"):
        AVLTree().insert(math.nan, 0)
    with pytest.raises(ValueError, match="build"):
        VoronoiTree().nearest(0.0)
    with pytest.raises(ValueError, match="finite"):
        VoronoiTree().build(np.array([]))
