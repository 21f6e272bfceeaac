"""Low-rank factors: nearly optimal, orthonormal, free of the batch they come in."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.lowrank import low_rank, orthonormal
from veloxquant.quantizers.sizes import CodecSpec
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec


def noise(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def missing(x: mx.array, rank: int) -> float:
    a, b = low_rank(x, rank)
    return float(mx.square(x - a @ b).sum().item())


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("spec", [AffineTokenSpec(2, 32), AffineChannelSpec(2, 32)])
def test_the_error_of_rounding_errors_is_within_three_percent_of_the_optimum(
    rank: int, spec: CodecSpec
) -> None:
    rows = noise(1, 1, 128, 8, seed=1) @ noise(8, 128, seed=2) / 2 + noise(1, 1, 128, 128, seed=3)
    codec = codec_for(spec, 128)
    x = (rows - codec.decode(codec.encode(rows), mx.float32))[0, 0]
    values = np.linalg.svd(np.array(x), compute_uv=False)
    assert missing(x, rank) <= 1.03 * np.square(values[rank:]).sum()


def test_full_rank_is_exact_and_more_rank_never_loses() -> None:
    x = noise(2, 40, 24, seed=4)
    errors = [missing(x, rank) for rank in (1, 3, 9, 24)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6 * mx.square(x).sum().item()


def test_columns_are_orthonormal_and_dependent_ones_vanish() -> None:
    q = np.array(orthonormal(noise(3, 50, 7, seed=5)))
    np.testing.assert_allclose(q.swapaxes(1, 2) @ q, np.eye(7)[None].repeat(3, 0), atol=1e-5)
    column = noise(20, 1, seed=6)
    twice = np.array(orthonormal(mx.concatenate([column, 2 * column], axis=1)))
    assert np.abs(twice[:, 1]).max() == 0


def test_zeros_and_huge_entries_stay_finite() -> None:
    for x in (mx.zeros((16, 8)), noise(16, 8) * 1e18):
        a, b = low_rank(x, 2)
        assert mx.isfinite(a @ b).all().item()


def test_a_matrix_is_treated_alone() -> None:
    x = noise(2, 3, 128, 64, seed=7)
    together = low_rank(x, 3)
    alone = low_rank(x[1:2, 2:3], 3)
    for whole, one in zip(together, alone, strict=True):
        assert mx.array_equal(whole[1:2, 2:3], one).item()
