"""Scores of NestedKV: anchors, normalisation, weights, gate, budgets of heads."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.cache.scorers import key_difference
from veloxquant.quantizers.nestedkv import (
    anomaly,
    blend_weights,
    block_means,
    block_size_for,
    head_adaptive_blend,
    nestedkv_allocate_head_budgets,
    nestedkv_score,
    per_scale_anomaly_scores,
    recent_means,
    surprise_gate,
    surprise_gated_score,
    unit_keys,
)

KEYS = mx.random.normal((2, 3, 300, 16), key=mx.random.key(1)) + 0.5
SCALES = per_scale_anomaly_scores(unit_keys(KEYS), 128, 64)


def test_block_sizes() -> None:
    assert [block_size_for(n) for n in (10, 4096, 6400, 20_000)] == [128, 128, 200, 256]


@pytest.mark.parametrize("window", [1, 5, 64, 300, 400])
def test_recent_means_are_those_of_a_loop(window: int) -> None:
    got = np.array(recent_means(KEYS, window))
    keys = np.array(KEYS, dtype=np.float64)
    for i in range(300):
        wanted = keys[..., max(0, i - window + 1) : i + 1, :].mean(axis=-2)
        assert np.abs(got[..., i, :] - wanted).max() < 1e-4


@pytest.mark.parametrize("n", [100, 128, 129, 300])
def test_blocks_end_where_they_should(n: int) -> None:
    keys = KEYS[..., :n, :]
    got, true = np.array(block_means(keys, 128)), np.array(keys, dtype=np.float64)
    for start in range(0, n, 128):
        wanted = true[..., start : start + 128, :].mean(axis=-2, keepdims=True)
        assert np.abs(got[..., start : start + 128, :] - wanted).max() < 1e-5


def test_anomalies_fill_the_unit_interval() -> None:
    for scale in SCALES:
        assert scale.min(axis=-1).tolist() == [[0.0] * 3] * 2
        assert scale.max(axis=-1).tolist() == [[1.0] * 3] * 2


def test_weights_sum_to_one_and_start_from_the_prior() -> None:
    weights = blend_weights(SCALES, 3.0)
    assert np.allclose(np.array(weights.sum(axis=-1)), 1.0, atol=1e-6)
    assert np.allclose(np.array(blend_weights(SCALES, 0.0)), (0.4, 0.4, 0.2), atol=1e-6)


def test_the_gate_between_blend_and_strongest() -> None:
    blend = head_adaptive_blend(*SCALES)
    gate = surprise_gate(*SCALES, 0.6, 10.0)
    assert 0 < gate.min().item() < gate.max().item() < 1
    closed = surprise_gated_score(*SCALES, blend, tau=1.1, kappa=100.0)
    assert mx.abs(closed - blend).max().item() < 1e-4
    opened = surprise_gated_score(*SCALES, blend, tau=-1.0, kappa=100.0)
    strongest = mx.stack(SCALES).max(axis=0)
    assert mx.abs(opened - strongest).max().item() < 1e-4


def test_lengths_of_keys_do_not_matter() -> None:
    factors = mx.random.uniform(0.01, 100.0, KEYS.shape[:3], key=mx.random.key(2))
    other = nestedkv_score(KEYS * factors[..., None])
    assert mx.abs(nestedkv_score(KEYS) - other).max().item() < 1e-4


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_equal_keys_have_no_anomaly(value: float) -> None:
    keys = mx.full((1, 2, 200, 16), value)
    assert not any(mx.abs(a).max().item() for a in per_scale_anomaly_scores(keys, 128, 64))
    assert nestedkv_score(keys).max().item() == nestedkv_score(keys).min().item()


def test_the_stable_scale_alone_ranks_as_keydiff() -> None:
    hat = unit_keys(KEYS)
    ours = np.argsort(np.array(anomaly(hat, hat.mean(axis=-2, keepdims=True))), axis=-1)
    assert (ours == np.argsort(np.array(key_difference(KEYS)), axis=-1)).mean() > 0.999


def test_many_heads_are_scored_as_one_by_one() -> None:
    single = nestedkv_score(KEYS[1, 2])
    assert mx.abs(nestedkv_score(KEYS)[1, 2] - single).max().item() < 1e-5


def test_budgets_of_heads() -> None:
    scores = [mx.array([9.0, 8.0, 7.0, 6.0]), mx.array([1.0, 0.5]), mx.array([5.0, 0.1, 0.1])]
    assert nestedkv_allocate_head_budgets(scores, 6, 0.0) == [4, 1, 1]
    assert nestedkv_allocate_head_budgets(scores, 6, 1.0) == [2, 2, 2]
    assert nestedkv_allocate_head_budgets(scores, 99) == [4, 2, 3]
