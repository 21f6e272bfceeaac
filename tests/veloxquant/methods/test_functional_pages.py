"""The documented functions of qfilters, kvzip and curdkv on rows of single heads."""

import importlib
from typing import Any

import mlx.core as mx
import pytest
from cache_lab import same

from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.methods.functional import curdkv, kvzip, qfilters

NAMES = ("qfilters", "kvzip", "curdkv")
D, BUDGET = 16, 24


def rows(n: int, seed: int = 0, heads: int | None = None) -> mx.array:
    shape = (n, D) if heads is None else (heads, n, D)
    return mx.random.normal(shape, key=mx.random.key(seed))


def of(name: str) -> dict[str, Any]:
    return vars(importlib.import_module(f"veloxquant.methods.functional.{name}"))


@pytest.mark.parametrize("name", NAMES)
def test_a_state_absorbs_rows_and_holds_its_budget(name: str) -> None:
    api, extra = of(name), {"calib_tokens": 8} if name == "qfilters" else {}
    state = api[f"init_{name}_state"](2, BUDGET, D, **extra)
    none = api[f"{name}_get_kv"](state)
    assert none[0].shape == none[1].shape == (0, D)
    keys, values = rows(50, 1), rows(50, 2)
    for start, stop in ((0, 5), (5, 6), (6, 40), (40, 41), (41, 50)):
        state = api[f"{name}_update"](state, keys[start:stop], values[start:stop])
        held = api[f"{name}_get_kv"](state)
        assert held[0].shape == held[1].shape == (min(stop, BUDGET), D)
        assert same(held[0][:2], keys[:2])
        assert same(held[1][-1], values[stop - 1])
    assert api[f"{name}_fp16_bytes"](state) == 2 * 2 * BUDGET * D
    assert api[f"full_{name}_fp16_bytes"](50, D) == 4 * 50 * D
    with pytest.raises(QuantizerConfigError, match=f"n_sink={BUDGET}"):
        api[f"init_{name}_state"](BUDGET, BUDGET, D)


def test_the_best_projections_stay_and_indices_say_which() -> None:
    keys, values, filters = rows(60, 3, 2), rows(60, 4, 2), rows(2, 5)
    k, v, scores, index = qfilters.qfilters_update_batched(
        keys, values, filters, BUDGET, 2, 3, -1, return_indices=True
    )
    assert same(k, mx.take_along_axis(keys, index[..., None], axis=1))
    assert same(v, mx.take_along_axis(values, index[..., None], axis=1))
    assert mx.allclose(scores, -(k * filters[:, None]).sum(-1), atol=1e-5).item()
    for head in range(2):
        state = qfilters.init_qfilters_state(2, BUDGET, D, 3, sign=-1, filter_dir=filters[head])
        state, kept = qfilters.qfilters_update(state, keys[head], values[head], return_indices=True)
        assert same(kept, index[head])


def test_without_a_filter_all_rows_stay_until_one_is_estimated_against_the_keys() -> None:
    keys = rows(40, 6) + 3 * rows(1, 7)
    state = qfilters.init_qfilters_state(2, BUDGET, D, calib_tokens=30)
    state = qfilters.qfilters_update(state, keys[:29], keys[:29])
    assert state.filter_dir is None
    assert state.keys is not None
    assert state.keys.shape[0] == 29
    state = qfilters.qfilters_update(state, keys[29:], keys[29:])
    assert state.filter_dir is not None
    assert (rows(1, 7)[0] * state.filter_dir).sum().item() < 0
    assert mx.allclose(state.filter_dir, -qfilters.estimate_filter_dir(keys[:30]), atol=1e-5)
    with pytest.raises(QuantizerConfigError, match="sign=0"):
        qfilters.init_qfilters_state(2, BUDGET, D, sign=0)


def test_rows_cannot_repeat_themselves_without_a_model() -> None:
    with pytest.raises(QuantizerConfigError, match="probe='reconstruct'"):
        kvzip.init_kvzip_state(2, BUDGET, D, "reconstruct")
    keys = rows(60, 8, 2)
    k, _, index = kvzip.kvzip_update_batched(
        None, None, keys, keys, 2, BUDGET, "context", return_indices=True
    )
    assert same(k, mx.take_along_axis(keys, index[..., None], axis=1))


def test_a_value_without_length_goes_first_and_positions_are_kept() -> None:
    keys, values = rows(60, 9), mx.array(rows(60, 10))
    values[20] = 0
    state = curdkv.init_curdkv_state(2, BUDGET, D)
    state = curdkv.curdkv_update(state, keys[:40], values[:40])
    state = curdkv.curdkv_update(state, keys[40:], values[40:])
    assert state.positions is not None
    assert state.n_updates is not None
    assert state.leverage_scores is not None
    places = state.positions.tolist()
    assert 20 not in places
    assert places[-16:] == list(range(44, 60))
    assert state.next_pos == 60
    assert same(state.keys, keys[mx.array(places)])
    assert state.n_updates.tolist() == [2 if p < 40 else 1 for p in places]
    assert state.leverage_scores.shape == (BUDGET,)
