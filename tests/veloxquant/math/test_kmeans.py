from itertools import pairwise

import numpy as np
import pytest

from veloxquant.math.kmeans import Nearest, kmeans


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def nearest_plainly(x: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.square(x.astype(np.float64)[:, None] - c[None]).sum(axis=-1).argmin(axis=1)


@pytest.mark.parametrize(("size", "dim"), [(2, 1), (16, 3), (256, 8), (4096, 4)])
def test_the_nearest_is_found(size: int, dim: int) -> None:
    x, c = normal(300, dim), normal(size, dim, seed=1)
    assert (Nearest(c)(x) == nearest_plainly(x, c)).mean() > 0.995


@pytest.mark.parametrize(("size", "dim"), [(2, 1), (5, 2), (256, 8), (4096, 4)])
def test_answers_do_not_depend_on_how_many_are_asked_for(size: int, dim: int) -> None:
    x, c = normal(203, dim), normal(size, dim, seed=1)
    search = Nearest(c)
    whole = search(x)
    for cut in (1, 7, 64, 100):
        parts = [search(x[i : i + cut]) for i in range(0, len(x), cut)]
        assert np.array_equal(np.concatenate(parts), whole), cut


def test_a_table_for_each_group() -> None:
    x, c = normal(5, 37, 4), normal(5, 32, 4, seed=1)
    found = Nearest(c)(x)
    for one, mine, table in zip(found, x, c, strict=True):
        assert np.array_equal(one, nearest_plainly(mine, table))


def test_ties_go_to_the_lowest() -> None:
    c = np.array([[1.0], [-1.0], [1.0]], dtype=np.float32)
    assert Nearest(c)(np.zeros((3, 1))).tolist() == [0, 0, 0]
    assert Nearest(c)(np.full((1, 1), 2.0)).tolist() == [0]


def test_errors_fall_and_the_result_is_repeatable() -> None:
    x = normal(4000, 4)
    a, errors = kmeans(x, 64, seed=3)
    b, _ = kmeans(x, 64, seed=3)
    assert np.array_equal(a, b)
    assert not np.array_equal(a, kmeans(x, 64, seed=4)[0])
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in pairwise(errors))
    assert len(errors) > 3


def test_clusters_are_found() -> None:
    centres = 10 * normal(20, 6)
    x = np.repeat(centres, 50, axis=0) + 0.01 * normal(1000, 6, seed=1)
    found, errors = kmeans(x, 20)
    assert errors[-1] < 6 * 1e-4 * 1.2
    assert len(set(Nearest(found)(centres))) == 20


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_fewer_rows_than_centroids_are_all_kept(rows: int) -> None:
    x = normal(rows, 4)
    c, errors = kmeans(x, 8)
    assert c.shape == (8, 4)
    assert errors[-1] == 0


def test_equal_rows() -> None:
    c, errors = kmeans(np.zeros((100, 4)), 16)
    assert not c.any()
    assert errors[-1] == 0


def test_an_empty_cell_moves_to_what_is_served_worst() -> None:
    far = np.array([[0.0], [0.1], [100.0]], dtype=np.float32)
    c, errors = kmeans(np.repeat(far, [500, 500, 1], axis=0), 3)
    assert errors[-1] < 1e-6
    assert c.max() == 100
