"""Tables of vectors, the rotation before them, and the codec of product codes."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.core.exceptions import CodebookDimensionMismatch
from veloxquant.quantizers import gaussian
from veloxquant.quantizers.hadamard import SmoothHadamard, hadamard_matrix, hadamard_rows
from veloxquant.quantizers.specs.vector import VectorSpec
from veloxquant.quantizers.vq import VectorCodec, VectorTable, gaussian_table, given_table


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


# ---- rotation -------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256, 72])
def test_the_rotation_is_orthonormal_and_agrees_with_its_matrix(dim: int) -> None:
    h = np.array(hadamard_matrix(dim), dtype=np.float64)
    assert np.abs(h @ h.T - np.eye(dim)).max() < 1e-5
    x = normal(5, dim)
    assert mx.abs(hadamard_rows(x) - x @ hadamard_matrix(dim)).max().item() < 1e-5
    if dim & (dim - 1) == 0:
        assert np.allclose(h[0], dim**-0.5)


@pytest.mark.parametrize("smooth", [None, (64,), (2, 64)])
def test_products_survive_the_dual_transform(smooth: tuple[int, ...] | None) -> None:
    factors = None if smooth is None else mx.exp(mx.random.uniform(-2.3, 2.3, smooth))
    basis = SmoothHadamard(64, factors)
    q, k = normal(1, 2, 4, 64), normal(1, 2, 9, 64, seed=1)
    turned = basis.rotate(k)
    got, want = basis.rotate_query(q) @ turned.swapaxes(-1, -2), q @ k.swapaxes(-1, -2)
    assert mx.abs(got - want).max().item() < 1e-4
    assert mx.abs(basis.unrotate(turned) - k).max().item() < 1e-4


# ---- tables ---------------------------------------------------------------------------------


def test_shipped_tables_are_those_that_training_makes() -> None:
    shipped = gaussian.gaussian_centroids(256, 8, kind="magnitude")
    assert not shipped.flags.writeable
    assert (shipped >= 0).all()
    made = gaussian.train(256, 8, gaussian.SEED, 1 << 13, 3, "magnitude")
    assert made.shape == shipped.shape
    assert np.array_equal(made, gaussian.train(256, 8, gaussian.SEED, 1 << 13, 3, "magnitude"))


@pytest.mark.parametrize(
    ("sub", "bits", "error"), [(4, 12, 0.0285), (8, 8, 0.326), (8, 16, 0.0968)]
)
def test_error_of_gaussian_tables(sub: int, bits: int, error: float) -> None:
    x = normal(1, 1, 4000, 4 * sub, seed=bits)
    table = gaussian_table(sub, bits)
    lost = mx.square(table.rows(table.nearest(x)) - x).mean().item()
    assert lost < error * 1.04
    assert lost > error * 0.9


def test_signs_and_magnitudes_find_the_nearest_of_the_whole_table() -> None:
    table, x = gaussian_table(4, 12), normal(1, 2, 50, 8)
    assert table.n_signs == 4
    plain = VectorTable(np.array(table.centroids).reshape(-1, 4))
    assert mx.array_equal(table.nearest(x), plain.nearest(x)).item()


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1), (1, 3)])
def test_tables_by_head_and_piece(lead: tuple[int, ...]) -> None:
    books = np.random.default_rng(0).standard_normal((*lead, 16, 4)).astype(np.float32)
    table, x = VectorTable(books), normal(2, 2, 7, 12)
    codes = table.nearest(x)
    wide = np.broadcast_to(books.reshape((1,) * (4 - books.ndim) + books.shape), (2, 3, 16, 4))
    pieces = np.array(x).reshape(2, 2, 7, 3, 1, 4)
    away = np.square(pieces - wide[None, :, None]).sum(axis=-1)
    assert np.array_equal(np.array(codes), away.argmin(axis=-1))
    picked = np.take_along_axis(
        np.broadcast_to(wide[None, :, None], (2, 2, 7, 3, 16, 4)),
        np.array(codes)[..., None, None].astype(np.int64), axis=4,
    )  # fmt: skip
    assert np.array_equal(np.array(table.rows(codes)), picked.reshape(2, 2, 7, 12))
    searched = x.reshape(2, 2, 7, 3, 4)
    assert mx.array_equal(table.nearest_on_device(searched), codes).item()


def test_a_codebook_of_another_shape_is_refused() -> None:
    def given(*shape: int) -> VectorTable:
        return given_table(np.ones(shape), "key_codebook", sub=4, bits=3, heads=2, dim=12)

    for shape in ((8, 4), (3, 8, 4), (2, 3, 8, 4), (1, 1, 8, 4), (1, 2, 3, 8, 4)):
        assert given(*shape).size == 8
    for shape in ((4, 8), (8, 3), (16, 4), (2, 8, 4), (3, 3, 8, 4), (8,)):
        with pytest.raises(CodebookDimensionMismatch, match="key_codebook"):
            given(*shape)
    with pytest.raises(CodebookDimensionMismatch, match="finite"):
        given_table(np.full((8, 4), np.nan), "x", sub=4, bits=3, heads=2, dim=12)


# ---- the codec ------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [True, False])
def test_products_are_those_with_the_decoded_rows(scaled: bool) -> None:
    spec = VectorSpec(4, 6, "hadamard", scaled)
    codec = VectorCodec(64, spec, None if scaled else VectorTable(np.random.randn(64, 4)))
    packed = codec.encode(normal(1, 2, 40, 64))
    rows = codec.decode(packed, mx.float32)
    q, w = normal(1, 2, 3, 64, seed=1), normal(1, 2, 3, 40, seed=2)
    assert mx.abs(codec.scores(q, packed) - q @ rows.swapaxes(-1, -2)).max().item() < 1e-4
    assert mx.abs(codec.mix(w, packed) - w @ rows).max().item() < 1e-4
    assert sum(a.nbytes for a in packed.values()) == 2 * spec.nbytes(40, 64, 4)


def test_decoded_rows_are_coded_alike() -> None:
    table = VectorTable(np.random.default_rng(0).standard_normal((256, 8)))
    codec = VectorCodec(64, VectorSpec(8, 8), table)
    packed = codec.encode(normal(1, 2, 40, 64))
    again = codec.encode(codec.decode(packed, mx.float32))
    assert mx.array_equal(packed["w"], again["w"]).item()


def test_a_table_with_all_pieces_loses_nothing() -> None:
    x = normal(1, 1, 16, 64)
    codec = VectorCodec(64, VectorSpec(8, 7), VectorTable(np.array(x).reshape(128, 8)))
    assert mx.array_equal(codec.decode(codec.encode(x), mx.float32), x).item()
