"""A balanced tree from numbers to integers, and the search for the nearest of many numbers."""

from collections.abc import Iterator

import numpy as np

from veloxquant.core.constants import VORONOI_LINEAR_THRESHOLD


class AVLNode:
    """One number, the integers that were inserted under it, and what lies below."""

    __slots__ = ("height", "key", "left", "right", "values")

    def __init__(self, key: float, value: int) -> None:
        self.key, self.values = key, [value]
        self.left: AVLNode | None = None
        self.right: AVLNode | None = None
        self.height = 1

    @property
    def value(self) -> int:
        """The integer that was inserted last."""
        return self.values[-1]


def _height(node: AVLNode | None) -> int:
    return node.height if node else 0


def _measure(node: AVLNode) -> None:
    node.height = 1 + max(_height(node.left), _height(node.right))


def _rise_left(node: AVLNode) -> AVLNode:
    """Turn so that the left child is on top."""
    top = node.left
    assert top is not None
    node.left, top.right = top.right, node
    _measure(node)
    _measure(top)
    return top


def _rise_right(node: AVLNode) -> AVLNode:
    """Turn so that the right child is on top."""
    top = node.right
    assert top is not None
    node.right, top.left = top.left, node
    _measure(node)
    _measure(top)
    return top


def _balanced(node: AVLNode) -> AVLNode:
    _measure(node)
    lean = _height(node.left) - _height(node.right)
    if lean > 1 and node.left is not None:
        if _height(node.left.left) < _height(node.left.right):
            node.left = _rise_right(node.left)
        return _rise_left(node)
    if lean < -1 and node.right is not None:
        if _height(node.right.right) < _height(node.right.left):
            node.right = _rise_left(node.right)
        return _rise_right(node)
    return node


class AVLTree:
    """Numbers to integers; the heights of neighbours differ by one at most."""

    def __init__(self) -> None:
        self._root: AVLNode | None = None

    def insert(self, key: float, value: int) -> None:
        """Add an integer under a number, beside those that are there.

        Raises:
            ValueError: for NaN, which has no place in an order.
        """
        if key != key:
            raise ValueError("NaN has no place in an order")
        self._root = self._insert(self._root, key, value)

    def _insert(self, node: AVLNode | None, key: float, value: int) -> AVLNode:
        if node is None:
            return AVLNode(key, value)
        if key == node.key:
            node.values.append(value)
            return node
        if key < node.key:
            node.left = self._insert(node.left, key, value)
        else:
            node.right = self._insert(node.right, key, value)
        return _balanced(node)

    def search_nearest(self, query: float) -> tuple[float, int]:
        """The number nearest to `query`, the lower of two, and the integer inserted there last.

        Raises:
            ValueError: when the tree is empty.
        """
        node, best = self._root, None
        while node is not None:
            if best is None or (abs(node.key - query), node.key) < (
                abs(best.key - query),
                best.key,
            ):
                best = node
            node = node.left if query < node.key else node.right
        if best is None:
            raise ValueError("the tree is empty; insert something first")
        return best.key, best.value

    def range_query(self, lo: float, hi: float) -> list[int]:
        """All integers under numbers from `lo` to `hi`, both included, by rising number."""
        return [value for node in self._between(self._root, lo, hi) for value in node.values]

    def _between(self, node: AVLNode | None, lo: float, hi: float) -> Iterator[AVLNode]:
        if node is None:
            return
        if lo < node.key:
            yield from self._between(node.left, lo, hi)
        if lo <= node.key <= hi:
            yield node
        if node.key < hi:
            yield from self._between(node.right, lo, hi)


class VoronoiTree:
    """Index of the nearest centroid: a scan for few, a tree for many; ties go to the lower."""

    LINEAR_THRESHOLD: int = VORONOI_LINEAR_THRESHOLD

    def __init__(self) -> None:
        self._centroids = np.zeros(0)
        self._tree: AVLTree | None = None

    def build(self, centroids: np.ndarray) -> None:
        """Take centroids (k,), replacing earlier ones.

        Raises:
            ValueError: without centroids, or for numbers that are not finite.
        """
        found = np.asarray(centroids, dtype=np.float64).reshape(-1)
        if not len(found) or not np.isfinite(found).all():
            raise ValueError("centroids must be finite numbers, at least one")
        self._centroids, self._tree = found, None
        if len(found) > self.LINEAR_THRESHOLD:
            self._tree = AVLTree()
            for index in reversed(range(len(found))):  # the first of equal centroids comes last
                self._tree.insert(float(found[index]), index)

    def nearest(self, value: float) -> int:
        """Index of the nearest centroid.

        Raises:
            ValueError: before `build`.
        """
        if self._tree is not None:
            return self._tree.search_nearest(value)[1]
        if not len(self._centroids):
            raise ValueError("there are no centroids yet; call build first")
        away = np.abs(self._centroids - value)
        nearest = np.flatnonzero(away == away.min())
        return int(nearest[np.argmin(self._centroids[nearest])])
