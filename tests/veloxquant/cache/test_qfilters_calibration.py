from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.architectures import prompt, tiny
from veloxquant.cache.probe import probe
from veloxquant.cache.qfilters_calibration import (
    QFiltersCalibration,
    average_gqa_filters,
    collect_query_activations,
    compute_qfilters,
    load_qfilters,
    save_qfilters,
)
from veloxquant.core.exceptions import QuantizerConfigError


class Words:
    """A tokenizer of numbers."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def planted(n: int = 3000, heads: int = 3, d: int = 32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    u = rng.standard_normal((heads, d))
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    return u, (3 * u[:, None] + rng.standard_normal((heads, n, d))).astype(np.float32)


def test_filters_find_the_shared_direction() -> None:
    u, q = planted()
    found = np.array(compute_qfilters(mx.array(q)))
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert np.all((found * u).sum(1) > 0.99)
    assert np.all(((q * found[:, None]).sum(-1) > 0).mean(1) > 0.5)
    keys = np.random.default_rng(1).standard_normal((500, 1)) * u[0] + 0.1 * planted(500)[1][0]
    rank = np.argsort(np.argsort(keys @ found[0]))
    truth = np.argsort(np.argsort(keys @ q[0].mean(0)))
    assert np.corrcoef(rank, truth)[0, 1] > 0.95


def test_orientation_follows_the_queries_in_any_unit() -> None:
    _, q = planted()
    found = compute_qfilters(mx.array(q))
    assert mx.allclose(compute_qfilters(mx.array(-q)), -found, atol=1e-5)
    assert mx.allclose(compute_qfilters(mx.array(q * 1e-25)), found, atol=1e-5)
    assert mx.allclose(compute_qfilters(mx.array(q).astype(mx.bfloat16)), found, atol=1e-2)
    assert mx.abs(compute_qfilters(mx.zeros((1, 5, 4)))).max() == 0


def test_groups_share_the_mean() -> None:
    filters = compute_qfilters(mx.array(planted(heads=6)[1]))
    mean = average_gqa_filters(filters, 2)
    wanted = filters.reshape(2, 3, 32).mean(axis=1)
    wanted = wanted / mx.linalg.norm(wanted, axis=-1, keepdims=True)
    assert mx.allclose(mean, wanted, atol=1e-6)
    with pytest.raises(ValueError, match="cannot share"):
        average_gqa_filters(filters, 4)
    for bad in (mx.zeros((3, 4)), mx.zeros((1, 0, 4)), mx.full((1, 2, 4), float("nan"))):
        with pytest.raises(ValueError, match="queries"):
            compute_qfilters(bad)


def test_queries_are_collected_text_by_text() -> None:
    model = tiny("llama")
    texts = [" ".join(map(str, prompt(40, seed))) for seed in (1, 2)]
    whole = collect_query_activations(model, Words(), texts)
    assert [q.shape for q in whole] == [(4, 80, 64)] * 2
    second = collect_query_activations(model, Words(), [texts[1]])
    assert mx.allclose(whole[1][:, 40:], second[1], atol=1e-4)
    few = collect_query_activations(model, Words(), texts, max_length=30, max_samples_per_head=21)
    assert few[0].shape == (4, 21, 64)
    with pytest.raises(QuantizerConfigError, match="no text"):
        collect_query_activations(model, Words(), [""])


def test_hidden_queries_are_said() -> None:
    model = tiny("gemma2")
    if probe(model).returns == "views":
        pytest.skip("its attention goes through the hook")
    with pytest.raises(QuantizerConfigError, match="cannot be seen"):
        collect_query_activations(model, Words(), [" ".join(map(str, prompt(40)))])


def test_filters_are_kept_bit_for_bit(tmp_path: Path) -> None:
    made = QFiltersCalibration([mx.ones((2, 8)) / 3, mx.zeros((2, 8))], "a/b", 17, "prose")
    place = save_qfilters(made, tmp_path / "deep" / "filters")
    assert place.name == "filters.npz"
    kept = load_qfilters(place, "a/b")
    assert (kept.model_id, kept.n_samples, kept.dataset) == ("a/b", 17, "prose")
    assert (kept.n_layers, kept.head_dim()) == (2, 8)
    assert all(mx.array_equal(a, b) for a, b in zip(kept.filters, made.filters, strict=True))
    with pytest.raises(ValueError, match="'a/b'"):
        load_qfilters(place, "c")
    place.write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match="no filters"):
        load_qfilters(place)
    with pytest.raises(FileNotFoundError):
        load_qfilters(tmp_path / "none.npz")
