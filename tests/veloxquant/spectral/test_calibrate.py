"""Eigenbases: how many directions there are, and files that come back bit by bit."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.architectures import tiny
from veloxquant.config.folders import HOME_VARIABLE
from veloxquant.config.rotations import rotations_file
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.spectral.bit_allocator import water_fill_bits
from veloxquant.spectral.calibrate import (
    calibrate_from_vectors,
    calibrate_spectral_rotation,
    collect_kv_vectors_mlx,
    load_cached_rotations,
    save_rotations,
)
from veloxquant.spectral.participation_ratio import (
    compute_participation_ratio,
    compute_spectral_gap,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    return tmp_path


def rank_four(n: int, dim: int = 64) -> np.ndarray:
    rng = np.random.default_rng(1)
    basis = rng.standard_normal((4, dim))
    return rng.standard_normal((n, 4)) @ basis + 0.05 * rng.standard_normal((n, dim))


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_directions_are_counted_whatever_the_scale(scale: float) -> None:
    assert 3 <= compute_participation_ratio(scale * rank_four(2_000)) <= 6
    isotropic = np.random.default_rng(2).standard_normal((50 * 64, 64))
    assert compute_participation_ratio(scale * isotropic) >= 0.9 * 64
    count, variances = compute_spectral_gap(scale * rank_four(2_000))
    assert 3 <= count <= 6
    assert (np.diff(variances) <= 0).all()
    assert variances[3] > 10 * variances[4]


@pytest.mark.parametrize("rows", [np.zeros(4), np.zeros((0, 4)), np.full((3, 4), np.nan)])
def test_what_is_no_matrix_of_vectors_is_refused(rows: np.ndarray) -> None:
    with pytest.raises(ValueError, match="finite"):
        compute_participation_ratio(rows)
    assert compute_participation_ratio(np.zeros((3, 4))) == 0


def test_rotations_come_back_bit_by_bit() -> None:
    rows = {n: rank_four(400 + n) for n in range(3)}
    made = calibrate_from_vectors(rows, rows, "mine")
    assert load_cached_rotations("none") is None
    back = load_cached_rotations("mine")
    assert back is not None
    assert sorted(back) == [0, 1, 2]
    for layer, entry in made.items():
        for a, b in zip(entry, back[layer], strict=True):
            assert np.array_equal(a, b)
            assert np.asarray(a).dtype == np.asarray(b).dtype or not np.ndim(a)
        assert np.abs(entry[0].T @ entry[0] - np.eye(64)).max() < 1e-5
        assert 3 <= entry[4] <= 6
    rotations_file("mine").write_bytes(b"no file of ours")
    assert load_cached_rotations("mine") is None


def test_names_and_entries_that_are_none_are_refused() -> None:
    for name in ("../mine", "", "a/b"):
        with pytest.raises(QuantizerConfigError, match="model_name"):
            load_cached_rotations(name)
    with pytest.raises(QuantizerConfigError, match="2 parts"):
        save_rotations("mine", {0: (np.eye(4), np.eye(4))})
    with pytest.raises(QuantizerConfigError, match="shape"):
        save_rotations("mine", {0: (np.eye(4), np.eye(4), np.ones(3), np.ones(4), 1, 1)})
    assert not rotations_file("mine").exists()


def test_a_model_is_calibrated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    tokens = mx.array(np.arange(200) % 50)
    keys, values = collect_kv_vectors_mlx(model, tokens, 100)
    assert sorted(keys) == sorted(values)
    heads = keys[0].shape[0] // 100
    assert keys[0].shape[0] == heads * 100
    made = calibrate_spectral_rotation(model, tokens, 100, "tiny")
    assert sorted(made) == sorted(keys)
    monkeypatch.setattr("veloxquant.spectral.calibrate.collect", None)
    again = calibrate_spectral_rotation(model, tokens, 100, "tiny")
    assert all(np.array_equal(a, b) for a, b in zip(made[0], again[0], strict=True))
    with pytest.raises(TypeError):
        calibrate_spectral_rotation(model, tokens, 100, "tiny", force_recompute=True)


def test_water_filling_spends_all_bits() -> None:
    bits = water_fill_bits(np.array([4.0, 1.0, 1.0, 0.1]), 9)
    assert bits.sum() == 9
    assert list(bits) == sorted(bits, reverse=True)
