import math

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.transforms import RecursivePolarTransform


@pytest.mark.parametrize(("d", "levels"), [(64, 6), (128, 4), (256, 8)])
def test_round_trip_is_exact(d: int, levels: int) -> None:
    x = np.random.default_rng(0).standard_normal((50, d)).astype(np.float32)
    transform = RecursivePolarTransform(levels)
    result = transform.forward(x)
    assert [a.shape for a in result.angles] == [(50, d >> (i + 1)) for i in range(levels)]
    assert result.n_levels == levels
    assert mx.allclose(transform.inverse(result), mx.array(x), rtol=1e-4, atol=1e-5)
    assert mx.all((result.angles[0] >= 0) & (result.angles[0] < 2 * math.pi))
    for angle in result.angles[1:]:
        assert mx.all((angle >= 0) & (angle <= math.pi / 2 + 1e-6))


def test_worked_example() -> None:
    result = RecursivePolarTransform(2).forward(np.array([[3.0, 4, 0, 5]]))
    assert result.angles[0].tolist()[0] == pytest.approx([0.9273, 1.5708], abs=1e-4)
    assert result.angles[1].tolist()[0] == pytest.approx([0.7854], abs=1e-4)
    assert result.final_radius.tolist() == pytest.approx([7.0711], abs=1e-4)


def test_zero_and_huge_vectors_are_safe() -> None:
    transform = RecursivePolarTransform(2)
    x = np.array([[0, 0, 0, 0], [1e30, -1e30, 1e30, 0], [0, -0.0, -1e-30, 0]], dtype=np.float32)
    result = transform.forward(x)
    assert all(mx.isfinite(a).all() for a in (*result.angles, result.final_radius))
    assert mx.allclose(transform.inverse(result), mx.array(x), rtol=1e-5)


def test_lengths_that_cannot_be_halved_are_refused() -> None:
    with pytest.raises(QuantizerConfigError, match="halved"):
        RecursivePolarTransform(3).forward(np.zeros((1, 12)))
    with pytest.raises(QuantizerConfigError, match="level"):
        RecursivePolarTransform(0)
