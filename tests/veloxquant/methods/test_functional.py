"""The documented functions on rows of single heads."""

import importlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import same

from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.methods.functional import cam, h2o, keyformer, knorm, morphkv, snapkv
from veloxquant.methods.functional import streaming_llm as stream

NAMES = ("cam", "h2o", "keyformer", "knorm", "morphkv", "tova")
D, BUDGET = 16, 12


def rows(n: int, seed: int = 0, heads: int | None = None) -> mx.array:
    shape = (n, D) if heads is None else (heads, n, D)
    return mx.random.normal(shape, key=mx.random.key(seed))


def of(name: str) -> dict[str, Any]:
    return vars(importlib.import_module(f"veloxquant.methods.functional.{name}"))


@pytest.mark.parametrize("name", NAMES)
def test_a_state_absorbs_rows_and_holds_its_budget(name: str) -> None:
    api = of(name)
    state = api[f"init_{name}_state"](2, BUDGET, D)
    none = api[f"{name}_get_kv"](state)
    assert none[0].shape == none[1].shape == (0, D)
    keys, values = rows(40, 1), rows(40, 2)
    for start, stop in ((0, 5), (5, 6), (6, 30), (30, 31), (31, 40)):
        state = api[f"{name}_update"](state, keys[start:stop], values[start:stop])
        held = api[f"{name}_get_kv"](state)
        assert held[0].shape == held[1].shape == (min(stop, BUDGET), D)
        assert same(held[0][:2], keys[:2])
        if name != "knorm":
            assert same(held[0][-1], keys[stop - 1])
    assert api[f"{name}_fp16_bytes"](state) == 2 * 2 * BUDGET * D
    assert api[f"full_{name}_fp16_bytes"](40, D) == 4 * 40 * D
    fed = {tuple(row) for row in keys.tolist()}
    assert {tuple(row) for row in held[0].tolist()} <= fed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sinks", [-1, BUDGET, 50])
def test_sinks_must_leave_room(name: str, sinks: int) -> None:
    with pytest.raises(QuantizerConfigError, match=f"n_sink={sinks}"):
        of(name)[f"init_{name}_state"](sinks, BUDGET, D)


def test_heads_of_a_list_do_as_they_do_alone() -> None:
    keys, values = rows(30, 3, 3), rows(30, 4, 3)
    both = h2o.h2o_update_batched(None, None, None, None, keys, values, 2, BUDGET, 1e4, 0, 2, 0.9)
    assert both[4] == 30
    again = h2o.h2o_update_batched(*both[:4], keys, values, 2, BUDGET, 1e4, both[4], 2, 0.9)
    for head in range(3):
        state = h2o.init_h2o_state(2, BUDGET, D, grace=2, decay=0.9)
        for _ in range(2):
            state = h2o.h2o_update(state, keys[head], values[head])
        assert state.next_pos == 60
        assert state.positions is not None
        assert same(state.positions, again[3][head])
        assert state.scores is not None
        assert mx.allclose(state.scores, again[2][head], rtol=1e-5).item()


def test_knorm_keeps_small_keys_and_says_which() -> None:
    keys, values = rows(30, 5, 2), rows(30, 6, 2)
    none = keys[:, :0]
    k, v, norms, index = knorm.knorm_update_batched(
        none, none, mx.zeros((2, 0)), keys, values, BUDGET, 2, 3, "low", return_indices=True
    )
    assert same(k, mx.take_along_axis(keys, index[..., None], axis=1))
    assert same(v, mx.take_along_axis(values, index[..., None], axis=1))
    assert mx.allclose(norms, mx.linalg.norm(k, axis=-1)).item()
    lengths = np.linalg.norm(np.array(keys), axis=-1)
    for head in range(2):
        free = index[head].tolist()[2:-3]
        assert sorted(np.argsort(lengths[head][2:27])[:7] + 2) == free


def test_morphkv_says_which_rows_stay() -> None:
    keys, values = rows(30, 7, 2), rows(30, 8, 2)
    k, _, index = morphkv.morphkv_update_batched(
        None, None, keys, values, 2, BUDGET, 4, return_indices=True
    )
    assert same(k, mx.take_along_axis(keys, index[..., None], axis=1))
    assert index[:, -5:].tolist() == [[25, 26, 27, 28, 29]] * 2


def test_keyformer_repeats_with_a_seed() -> None:
    kept = []
    for seed in (1, 1, 2):
        state = keyformer.init_keyformer_state(2, BUDGET, D, seed=seed, tau_end=2.0, anneal_steps=8)
        assert state.tau == 1.0
        keyformer.keyformer_update(state, 0.1 * rows(40, 9), rows(40, 10))
        assert state.tau == 2.0
        assert state.positions is not None
        kept.append(state.positions.tolist())
    assert kept[0] == kept[1] != kept[2]


def test_cam_merges_pairs() -> None:
    k, v = mx.ones((D,)), mx.arange(D, dtype=mx.float32)
    key, value = cam.merge_pair(k, v, k, 3 * v, "sim_weighted", merge_keys=True)
    assert key.dtype == value.dtype == mx.float16
    assert mx.allclose(value.astype(mx.float32), 2 * v).item()
    assert same(cam.merge_pair(k, v, -k, v, "drop", merge_keys=False)[1], v.astype(mx.float16))
    opposite = cam.merge_pair(k, v, -k, 9 * v, "sim_weighted", merge_keys=False)[1]
    assert same(opposite, v.astype(mx.float16))
    with pytest.raises(QuantizerConfigError, match="sequential"):
        cam.merge_pair(k, v, k, v, "sequential", merge_keys=False)


def test_cam_finds_the_most_similar_survivor() -> None:
    keys = rows(10, 11)
    assert cam.most_similar_survivor(keys[7], keys, -1, 2) == 7
    other = cam.most_similar_survivor(keys[7], keys, 7, 2)
    assert other not in (0, 1, 7)
    assert cam.most_similar_survivor(keys[0], keys[:3], 2, 2) == -1


def test_cam_gates() -> None:
    assert cam.merge_gate_probability(1.0, 4.0) == 0.25
    assert cam.merge_gate_probability(4.0, 1.0) == 1.0
    assert cam.merge_gate_probability(0.0, 0.0) == 1.0
    draws = [cam.sample_merge_gate(0.3, 5, i) for i in range(300)]
    assert draws == [cam.sample_merge_gate(0.3, 5, i) for i in range(300)]
    assert 50 < sum(draws) < 130


def test_cam_says_where_the_kept_rows_came_from() -> None:
    state = cam.init_cam_state(2, BUDGET, D)
    keys = rows(30, 12)
    _, first = cam.cam_update(state, keys[:20], keys[:20], None, new_positions=mx.arange(100, 120))
    assert first is not None
    _, both = cam.cam_update(state, keys[20:], keys[20:], first, new_positions=mx.arange(120, 130))
    assert both is not None
    assert same(keys[both - 100], cam.cam_get_kv(state)[0])


def test_snapkv_keeps_sinks_the_window_and_the_best() -> None:
    keys, values = rows(60, 13), rows(60, 14)
    state = snapkv.snapkv_compress(keys, values, 20, 6, 3, output_dtype=mx.float32)
    index = state.kept_indices.tolist()
    assert (state.n_original, state.n_kept) == (60, 20)
    assert index == sorted(set(index))
    assert index[:3] == [0, 1, 2]
    assert index[-6:] == [54, 55, 56, 57, 58, 59]
    assert same(state.kept_values, values[state.kept_indices])
    assert snapkv.snapkv_fp16_bytes(state) == 4 * 20 * D
    assert snapkv.full_fp16_bytes(60, D) == 4 * 60 * D
    scores = snapkv.obs_window_attention_scores(keys, 6)
    assert scores.sum().item() == pytest.approx(1.0, abs=1e-5)


def test_snap_select_treats_what_is_no_number_as_worst() -> None:
    scores = mx.array([0.0, float("nan"), 2.0, 2.0, 1.0])
    assert snapkv.snap_select_indices(scores, 3, 1).tolist() == [0, 2, 3]
    assert snapkv.snap_select_indices(scores, 9, 1).tolist() == [0, 1, 2, 3, 4]


def test_a_streaming_window_keeps_first_and_newest() -> None:
    keys, values = rows(30, 15), rows(30, 16)
    window = stream.init_streaming_window(3, D, mx.float32)
    for start in range(0, 30, 2):
        window = stream.stream_update(
            window, keys[start : start + 2], values[start : start + 2], 3, 7
        )
    assert (window.n_sink, window.n_recent, window.tokens_seen) == (3, 7, 30)
    k, v = stream.stream_get_kv(window)
    at = mx.array([0, 1, 2, *range(23, 30)])
    assert same(k, keys[at])
    assert same(v, values[at])
    assert stream.stream_fp16_bytes(window) == 4 * 10 * D
    assert stream.full_stream_fp16_bytes(30, D) == 4 * 30 * D
