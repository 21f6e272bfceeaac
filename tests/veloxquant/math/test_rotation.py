"""Seeded maps and the sizes that MLX's Hadamard transform really supports."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.math.rotation import (
    hadamard_blocks,
    is_hadamard_compatible,
    make_hadamard_diagonal,
    make_jl_matrix,
    make_rotation_matrix,
)


@pytest.mark.parametrize("d", [8, 64, 80, 128])
def test_haar_matrices_are_orthogonal_and_seeded(d: int) -> None:
    matrix = make_rotation_matrix(d, 7)
    assert np.abs(matrix @ matrix.T - np.eye(d)).max() < 1e-10
    assert abs(abs(np.linalg.det(matrix)) - 1) < 1e-8
    assert np.array_equal(matrix, make_rotation_matrix(d, 7))
    assert not np.allclose(matrix, make_rotation_matrix(d, 8))
    matrix[0] = 0
    assert make_rotation_matrix(d, 7)[0].any()


@pytest.mark.parametrize("d", [1, 2, 4, 24, 64, 96, 128, 192, 256])
def test_compatible_sizes_are_their_own_inverse(d: int) -> None:
    assert is_hadamard_compatible(d)
    twice = mx.hadamard_transform(mx.hadamard_transform(mx.eye(d)))
    assert mx.abs(twice - mx.eye(d)).max().item() < 1e-5


@pytest.mark.parametrize("d", [0, -4, 3, 12, 20, 28, 40, 72, 80, 100, 112, 160, 224, 576])
def test_other_sizes_are_not(d: int) -> None:
    assert not is_hadamard_compatible(d)


@pytest.mark.parametrize("d", [*range(1, 130, 7), 72, 80, 96, 100, 112, 128, 192, 256, 576])
def test_blocks_sum_to_the_size_and_each_is_transformed(d: int) -> None:
    blocks = hadamard_blocks(d)
    assert sum(blocks) == d
    assert list(blocks) == sorted(blocks, reverse=True)
    for size in set(blocks) - {1}:
        image = mx.hadamard_transform(mx.eye(size))
        assert mx.abs(image @ image.T - mx.eye(size)).max().item() < 1e-5


def test_signs_and_sketches_are_seeded() -> None:
    signs = make_hadamard_diagonal(256, 3)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert np.array_equal(signs, make_hadamard_diagonal(256, 3))
    sketch = make_jl_matrix(64, 4096, 5)
    assert sketch.shape == (4096, 64)
    x = np.random.default_rng(0).standard_normal(64)
    assert np.sum((sketch @ x) ** 2) / 4096 == pytest.approx(np.sum(x * x), rel=0.1)
