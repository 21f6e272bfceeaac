import logging
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.observers import (
    DistortionObserver,
    KeyNormObserver,
    LatencyObserver,
    MemoryObserver,
    QuantizationEvent,
    QuantizationObserver,
    notify,
)


class Failing(QuantizationObserver):
    def on_event(self, event: QuantizationEvent) -> None:
        raise RuntimeError("no")


def test_notify_reaches_every_observer_past_one_that_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    norms = KeyNormObserver()
    with caplog.at_level(logging.ERROR):
        notify([Failing(), norms], "append_key", (4,), metadata={"key_l2_norm_sq": 2.0})
    assert norms.report().n_tokens == 1
    assert "Failing" in caplog.text


def test_notify_makes_metadata_only_for_listeners() -> None:
    notify([], "append_key", (4,), metadata=lambda: pytest.fail("made for nobody"))
    norms = KeyNormObserver()
    notify([norms], "append_key", (4,), metadata=lambda: {"key_l2_norm_sq": mx.array([1.0, 4.0])})
    assert norms.report().max_norm_sq == 4


def test_distortion_is_weighted_by_vectors() -> None:
    observer = DistortionObserver(b=2, d=2, query=np.array([1.0, 0.0]))
    x = np.array([[1.0, 0.0]])
    notify([observer], "a", x.shape, metadata={"x_original": x, "x_reconstructed": x})
    many = np.repeat(x, 3, axis=0)
    pair = {"x_original": mx.array(many).astype(mx.bfloat16), "x_reconstructed": 0 * many}
    notify([observer], "a", many.shape, metadata=pair)
    report = observer.report()
    assert report.n_samples == 4
    assert report.empirical_mse == pytest.approx(0.75)
    assert report.empirical_ip_distortion == pytest.approx(0.75)
    assert report.theoretical_mse_upper == pytest.approx(math.sqrt(3 * math.pi) / 2 / 16)
    assert report.theoretical_mse_lower == pytest.approx(1 / 16)
    assert report.mse_ratio == pytest.approx(0.75 / report.theoretical_mse_upper)
    observer.reset()
    assert observer.report().n_samples == 0


def test_distortion_of_zero_vectors_is_finite() -> None:
    observer = DistortionObserver()
    zero = np.zeros((2, 4))
    notify([observer], "a", zero.shape, metadata={"x_original": zero, "x_reconstructed": zero})
    assert observer.report().empirical_mse == 0


def test_distortion_plot_is_a_picture(tmp_path: Path) -> None:
    observer = DistortionObserver()
    with pytest.raises(ValueError, match="nothing to draw"):
        observer.plot(str(tmp_path / "a.svg"))
    x = np.ones((1, 4))
    for scale in (0.9, 0.95):
        notify([observer], "a", (1, 4), metadata={"x_original": x, "x_reconstructed": scale * x})
    observer.plot(str(tmp_path / "a.svg"))
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    with pytest.raises(ValueError, match=r"\.svg"):
        observer.plot(str(tmp_path / "a.png"))


def test_key_norms_report_spread() -> None:
    observer = KeyNormObserver()
    assert observer.report().heterogeneity_ratio == 1
    notify([observer], "append_key", (4,), metadata={"key_l2_norm_sq": 2.0})
    notify([observer], "append_key", (4,), metadata={"key_l2_norm_sq": np.array([8.0, 2.0])})
    notify([observer], "attend", (4,))
    report = observer.report()
    assert (report.n_tokens, report.mean_norm_sq) == (3, 4)
    assert report.heterogeneity_ratio == 4
    observer.reset()
    assert observer.report().n_tokens == 0


def test_latency_and_memory_report_by_stage() -> None:
    latency, memory = LatencyObserver(), MemoryObserver()
    for ms, delta in ((1.0, 100), (3.0, 50)):
        notify([latency, memory], "append_key", (4,), ms, delta)
    notify([latency, memory], "attend", (4,), 5.0, -20)
    assert latency.report()["append_key"]["mean"] == 2
    assert latency.report()["append_key"]["count"] == 2
    assert latency.report()["attend"]["max"] == 5
    assert memory.report() == {"append_key": 150, "attend": -20}
    assert memory.peak_delta_bytes() == 100
    latency.reset()
    assert latency.report() == {}
