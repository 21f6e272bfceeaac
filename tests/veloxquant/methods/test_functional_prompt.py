"""The documented functions of pyramidkv, squeeze, nestedkv and chunkkv on rows of single heads."""

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import same

from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.methods.functional import chunkkv, nestedkv, pyramidkv, squeeze

D, BUDGET = 16, 12


def rows(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal((*shape, D), key=mx.random.key(seed))


def test_pyramids_and_squeezed_layers_hold_their_budget() -> None:
    keys, values = rows(40, seed=1), rows(40, seed=2)
    for init, update, get, nbytes in (
        (pyramidkv.init_pyramid_state, pyramidkv.pyramid_update, pyramidkv.pyramid_get_kv,
         pyramidkv.pyramid_fp16_bytes),
        (squeeze.init_squeeze_state, squeeze.squeeze_update, squeeze.squeeze_get_kv,
         squeeze.squeeze_fp16_bytes),
    ):  # fmt: skip
        state = init(2, BUDGET, D)
        assert get(state)[0].shape == (0, D)
        for start, stop in ((0, 5), (5, 30), (30, 31), (31, 40)):
            state = update(state, keys[start:stop], values[start:stop])
            held = get(state)[0]
            assert held.shape == (min(stop, BUDGET), D)
            assert same(held[:2], keys[:2])
            assert same(held[-1], keys[stop - 1])
        assert nbytes(state) == 4 * BUDGET * D
        with pytest.raises(QuantizerConfigError, match="n_sink=12"):
            init(BUDGET, BUDGET, D)


def test_heads_do_as_they_do_alone() -> None:
    keys, values = rows(3, 30, seed=3), rows(3, 30, seed=4)
    out = squeeze.squeeze_update_batched(None, None, None, keys, values, 2, BUDGET)
    states = [pyramidkv.init_pyramid_state(2, BUDGET, D) for _ in range(3)]
    for head, state in enumerate(pyramidkv.pyramid_update_heads(states, keys, values)):
        assert same(state.keys, out[0][head])
        assert same(state.values, out[1][head])
    fewer = squeeze.squeeze_trim_batched(*out, 2, 6)
    assert fewer[0].shape == (3, 6, D)
    assert same(fewer[0][:, :2], keys[:, :2])
    assert same(fewer[0][:, -1], keys[:, -1])
    assert squeeze.squeeze_trim_batched(*out, 2, 50)[0] is out[0]
    assert squeeze.squeeze_trim_batched(None, None, None, 2, 6) == (None, None, None)


def test_nestedkv_holds_the_best_rows_and_appends() -> None:
    keys, values = rows(2, 60, seed=5), rows(2, 60, seed=6)
    kept = nestedkv.nestedkv_compress_prefill_batched(keys, values, 2, BUDGET, return_indices=True)
    assert kept[2].shape == (2, BUDGET)
    assert (np.diff(np.array(kept[2]), axis=-1) > 0).all()
    assert kept[2][:, :2].tolist() == [[0, 1]] * 2
    state = nestedkv.init_nestedkv_state(2)
    state = nestedkv.nestedkv_compress_prefill(state, keys[1], values[1], BUDGET)
    assert state.compressed
    assert same(state.keys, kept[0][1])
    assert same(state.values, mx.take(values[1], kept[2][1], axis=0))
    state = nestedkv.nestedkv_append_decode(state, keys[0, :3], values[0, :3])
    assert same(nestedkv.nestedkv_get_kv(state)[1][-3:], values[0, :3])
    assert nestedkv.nestedkv_fp16_bytes(state) == 4 * (BUDGET + 3) * D
    fresh = nestedkv.nestedkv_append_decode(nestedkv.init_nestedkv_state(2), keys[0], values[0])
    assert same(fresh.keys, keys[0])


def test_chunks_of_a_head() -> None:
    sinks, chunks = chunkkv.chunk_partition(11, 4, 2)
    assert (sinks, chunks) == ([0, 1], [(2, 6), (6, 10), (10, 11)])
    scores = mx.array([0, 0, 1, 1, 1, 1, 9, 0, 0, 0, 2.0])
    assert chunkkv.chunk_scores(scores, chunks).tolist() == [1.0, 2.25, 2.0]
    assert chunkkv.chunk_scores(scores, []).shape == (0,)
    keep = chunkkv.chunkkv_keep_mask(scores, 11, 4, 2, 8)
    assert [i for i, kept in enumerate(keep.tolist()) if kept] == [0, 1, 6, 7, 8, 9, 10]
    assert chunkkv.chunkkv_keep_mask(scores, 11, 4, 2, 11).all().item()
    assert chunkkv.full_chunkkv_fp16_bytes(11, D) == 4 * 11 * D
    with pytest.raises(QuantizerConfigError, match="n_sink=8"):
        chunkkv.chunkkv_keep_mask(scores, 11, 4, 8, 8)
