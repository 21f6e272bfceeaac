"""RateQuant: exact means, optimal bits, the fitted curve, calibration on a model."""

import itertools
import logging

import numpy as np
import pytest

from tests.architectures import tiny
from veloxquant.allocators.ratequant import (
    allocate_bits_ratequant,
    calibrate_layer_sensitivities,
    fit_distortion_curve,
)
from veloxquant.cache.builder import KVCacheBuilder
from veloxquant.config.kv_cache import KVCacheConfig


def cost(weights, bits, beta=3.5):
    return sum(w * beta**-b for w, b in zip(weights, bits, strict=True))


def test_worked_examples():
    assert allocate_bits_ratequant((1, 2, 4, 8), 2) == [1, 2, 2, 3]
    assert allocate_bits_ratequant((1, 2, 4, 8), 1.5) == [1, 1, 2, 2]
    bits = allocate_bits_ratequant((1, 1, 1, 100), 2)
    assert bits == [2, 2, 1, 3]
    assert cost((1, 1, 1, 100), bits) == pytest.approx(2.7813, abs=5e-5)


@pytest.mark.parametrize("choices", [(1, 2, 3), (2, 4, 8), (1, 3)])
def test_the_mean_is_kept_with_members_only_and_nothing_is_cheaper(choices):
    draw = np.random.default_rng(3)
    for _ in range(40):
        weights = np.exp(draw.normal(size=5) * 2)
        target = draw.uniform(choices[0], choices[-1])
        got = allocate_bits_ratequant(weights, target, bit_choices=choices)
        assert set(got) <= set(choices)
        sums = {sum(b) for b in itertools.product(choices, repeat=5)}
        total = max(s for s in sums if s <= round(target * 5))
        assert sum(got) == total
        best = min(
            cost(weights, b) for b in itertools.product(choices, repeat=5) if sum(b) == total
        )
        assert cost(weights, got) == pytest.approx(best, rel=1e-9)
        assert allocate_bits_ratequant(7 * weights, target, bit_choices=choices) == got
        for i, j in itertools.product(range(5), repeat=2):
            assert weights[i] <= weights[j] or got[i] >= got[j]


def test_beta_sets_how_far_bits_spread():
    weights = (1, 2, 4, 8)
    assert allocate_bits_ratequant(weights, 2, beta=1e6) == [2, 2, 2, 2]
    assert allocate_bits_ratequant(weights, 2, beta=1.001) == [1, 1, 3, 3]
    own, other = (allocate_bits_ratequant(weights, 2.5, beta=b) for b in (5.0, 2.0))
    assert cost(weights, own, 5.0) <= cost(weights, other, 5.0)


@pytest.mark.parametrize(
    ("weights", "target", "options"),
    [
        ((1, 0), 2, {}), ((1, float("nan")), 2, {}), ((1, 2), 0.5, {}), ((1, 2), 4, {}),
        ((1, 2), 2, {"beta": 1.0}), ((1, 2), 2, {"bit_choices": (3, 1)}),
    ],
)  # fmt: skip
def test_impossible_input_is_refused(weights, target, options):
    with pytest.raises(ValueError, match=r"sensitivities|target_avg_bits|beta|bit_choices"):
        allocate_bits_ratequant(weights, target, **options)


@pytest.mark.parametrize("dim", [64, 128])
def test_the_curve_of_the_rotated_codebook(dim):
    alpha, beta = fit_distortion_curve(dim)
    assert 1.0 <= alpha <= 1.4
    assert 3.0 <= beta <= 3.6
    assert fit_distortion_curve(dim) == (alpha, beta)
    assert fit_distortion_curve(dim, (2, 3, 4))[1] == pytest.approx(3.5, abs=0.15)
    with pytest.raises(ValueError, match="two widths"):
        fit_distortion_curve(dim, (2,))


class Letters:
    """A tokenizer of one token a letter."""

    def encode(self, text: str) -> list[int]:
        return [1 + ord(letter) % 300 for letter in text]


def test_a_model_is_calibrated_by_the_norms_of_its_keys(caplog):
    model = tiny("llama")
    before = vars(model).keys()
    with caplog.at_level(logging.INFO):
        weights = calibrate_layer_sensitivities(model, Letters(), verbose=True)
    assert len(weights) == 2
    assert all(w > 0 for w in weights)
    assert len(caplog.records) == 8
    assert vars(model).keys() == before
    two = ["abc", "defgh"]
    quiet = calibrate_layer_sensitivities(model, Letters(), two, seq_len=4)
    keys = model.layers[0].self_attn.k_proj
    original = keys.weight
    try:
        keys.weight = original * 3
        louder = calibrate_layer_sensitivities(model, Letters(), two, seq_len=4)
    finally:
        keys.weight = original
    assert louder[0] == pytest.approx(9 * quiet[0], rel=0.01)
    # Every prompt starts from empty caches, so their order does not matter.
    turned = calibrate_layer_sensitivities(model, Letters(), two[::-1], seq_len=4)
    assert turned == pytest.approx(quiet, rel=1e-5)
    with pytest.raises(ValueError, match="nothing to calibrate"):
        calibrate_layer_sensitivities(model, Letters(), [""])


def test_the_result_is_a_bit_list_for_a_model():
    model = tiny("llama")
    bits = allocate_bits_ratequant(calibrate_layer_sensitivities(model, Letters()), 1.5)
    assert sum(bits) == 3
    caches = KVCacheBuilder.for_model(
        model, KVCacheConfig(method="turboquant_rvq", bit_width_inlier=bits)
    )
    assert [cache.assigned_bits for cache in caches] == bits
