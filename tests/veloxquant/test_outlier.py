import mlx.core as mx
import numpy as np
import pytest

from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.outlier import OutlierDetector


def test_loudest_channels_are_found_whatever_the_calls() -> None:
    x = np.random.default_rng(0).standard_normal((50, 16))
    x[:, [11, 3]] *= 20
    whole, cut = OutlierDetector(2, 40), OutlierDetector(2, 40)
    whole.observe(x)
    for row in x:
        cut.observe(mx.array(row.astype(np.float32)).astype(mx.bfloat16))
    assert whole.get_outlier_channels().tolist() == [3, 11]
    assert cut.get_outlier_channels().tolist() == [3, 11]
    assert whole.n_observed == cut.n_observed == 40


def test_only_the_first_keys_count() -> None:
    detector = OutlierDetector(1, 2)
    detector.observe(np.array([[1.0, 0, 0], [1, 0, 0], [0, 100, 0]]))
    detector.observe(np.array([0.0, 100, 0]))
    assert detector.get_outlier_channels().tolist() == [0]


def test_asking_too_early_and_wrong_sizes_are_refused() -> None:
    detector = OutlierDetector(2, 5)
    with pytest.raises(RuntimeError, match="0 of 5"):
        detector.get_outlier_channels()
    detector.observe(np.ones(4))
    assert not detector.is_calibrated
    with pytest.raises(ValueError, match="after keys of 4"):
        detector.observe(np.ones(5))
    with pytest.raises(ValueError, match="2 outliers"):
        OutlierDetector(2).observe(np.ones(2))
    with pytest.raises(QuantizerConfigError):
        OutlierDetector(0)
    detector.reset()
    assert detector.n_observed == 0
