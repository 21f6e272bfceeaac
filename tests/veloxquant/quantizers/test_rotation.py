"""The rotation of the codebook codecs: orthogonal, invertible, the same for any batch."""

import copy

import mlx.core as mx
import pytest

from veloxquant.quantizers.rotation import Matrix, rotation

SIZES = [8, 64, 72, 80, 96, 100, 112, 128, 192, 256]


@pytest.mark.parametrize("dim", SIZES)
def test_rotations_are_orthogonal_and_invert(dim: int) -> None:
    one = rotation(dim, 42)
    assert mx.abs(one.matrix @ one.matrix.T - mx.eye(dim)).max().item() < 1e-5
    x = mx.random.normal((5, dim), key=mx.random.key(1))
    y = one.rotate(x)
    assert mx.abs(one.rotate_query(x) - y).max().item() < 1e-4
    assert mx.abs(one.unrotate(y) - x).max().item() < 1e-4
    assert mx.abs((x * x).sum(-1) - (y * y).sum(-1)).max().item() < 1e-3 * dim


@pytest.mark.parametrize("dim", SIZES)
def test_a_vector_is_rotated_alike_in_any_company(dim: int) -> None:
    one = rotation(dim, 42)
    x = mx.random.normal((2, 3, 65, dim), key=mx.random.key(2))
    many = one.rotate(x)
    for i in (0, 13, 64):
        assert mx.array_equal(one.rotate(x[:, :, i : i + 1]), many[:, :, i : i + 1]).item()
    assert mx.array_equal(one.rotate(x[1, 2, 7]), many[1, 2, 7]).item()


@pytest.mark.parametrize("dim", [64, 80, 100, 128])
def test_a_lone_coordinate_is_spread_out(dim: int) -> None:
    kept = [mx.abs(rotation(dim, seed).rotate(mx.eye(dim)[0])).max().item() for seed in range(5)]
    assert max(kept) < 0.75
    assert rotation(dim, 1) is rotation(dim, 1)
    assert mx.abs(rotation(dim, 1).matrix - rotation(dim, 2).matrix).max().item() > 0.1


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("rows", [4, 40, 128, 200])
def test_a_matrix_maps_a_row_alike_alone_and_in_company(heads: int, rows: int) -> None:
    shape = (rows, 128) if heads == 1 else (heads, rows, 128)
    given = Matrix(mx.random.normal(shape, key=mx.random.key(1)))
    x = mx.random.normal((2, heads, 37, 128), key=mx.random.key(2))
    whole = given.rotate(x)
    assert whole.shape == (2, heads, 37, rows)
    assert mx.allclose(whole, given.rotate_query(x), atol=1e-3).item()
    for start, stop in ((0, 1), (5, 6), (7, 37), (36, 37)):
        assert mx.array_equal(given.rotate(x[:, :, start:stop]), whole[:, :, start:stop]).item()
    back = given.unrotate(whole)
    assert mx.allclose(back, whole @ given.matrix, atol=1e-3).item()
    assert copy.deepcopy(given) is given
