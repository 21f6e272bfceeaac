"""Concentration of keys, and budgets weighted by it."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.quantizers.squeeze import concentration_score, squeeze_budgets


def test_concentration_is_the_mean_cosine_of_pairs() -> None:
    keys = mx.random.normal((20, 8), key=mx.random.key(1)) + 1.0
    unit = np.array(keys, dtype=np.float64)
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    cosines = unit @ unit.T
    wanted = cosines[~np.eye(20, dtype=bool)].mean()
    assert concentration_score(keys) == pytest.approx(wanted, abs=1e-5)
    assert concentration_score(keys.astype(mx.float16)) == pytest.approx(wanted, abs=1e-3)
    assert concentration_score(keys[:1]) == 0.0
    assert concentration_score(mx.ones((5, 8))) == pytest.approx(1.0)


def test_budgets_follow_the_weights() -> None:
    assert squeeze_budgets([0.0, 0.5, 0.75], 70, 0) == [120, 60, 30]
    assert squeeze_budgets([0.0, 0.5, 0.75], 70, 4, 0.0) == [70] * 3
    assert squeeze_budgets([2.0, 1.0], 70, 4) == [70, 70]
    spread = squeeze_budgets([-1.0, 1.0], 70, 4)
    assert (sum(spread), min(spread)) == (140, 5)
    assert squeeze_budgets([], 70, 4) == []
    with pytest.raises(ValueError, match="n_sink"):
        squeeze_budgets([0.1], 4, 4)
