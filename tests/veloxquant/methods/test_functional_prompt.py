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


SINKS, CHUNK = 2, 4


def chunk_state(mode: str = "attn_mass") -> chunkkv.ChunkKVState:
    return chunkkv.init_chunkkv_state(SINKS, BUDGET, D, CHUNK, mode)


def told(keys: np.ndarray, mode: str) -> list[list[int]]:
    """Kept tokens after each of these keys, token by token in float64."""
    held: list[int] = []
    mass: dict[int, float] = {}
    out = []
    for t, key in enumerate(keys):
        held.append(t)
        mass[t] = 0.0
        rows = keys[held]
        if mode == "attn_mass":
            logits = rows @ key / np.sqrt(D)
            weights = np.exp(logits - logits.max())
            for i, w in zip(held, weights / weights.sum(), strict=True):
                mass[i] += w
            scores = np.array([mass[i] for i in held])
        elif mode == "key_norm":
            scores = -np.linalg.norm(rows, axis=-1)
        else:
            unit = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
            scores = -unit @ unit.mean(axis=0)
        if len(held) > BUDGET:
            body = range(SINKS, len(held), CHUNK)
            full = [i for i in body if i + CHUNK < len(held)]
            worst = min(full, key=lambda i: scores[i : i + CHUNK].mean())
            held = held[:worst] + held[worst + CHUNK :]
        out.append(list(held))
    return out


@pytest.mark.parametrize("mode", ["attn_mass", "key_norm", "keydiff"])
@pytest.mark.parametrize("cuts", [(40,), (5, 12, 13, 14, 30, 40)])
def test_whole_chunks_go_token_by_token(mode: str, cuts: tuple[int, ...]) -> None:
    keys, values = rows(40, seed=7), rows(40, seed=8)
    state, start, lists = chunk_state(mode), 0, []
    for stop in cuts:
        state, kept = chunkkv.chunkkv_update(state, keys[start:stop], values[start:stop], True)
        lists += kept
        start = stop
    held: list[int] = []
    wanted = told(np.array(keys, dtype=np.float64), mode)
    for t, (kept, want) in enumerate(zip(lists, wanted, strict=True)):
        held = [[*held, t][i] for i in kept]
        assert held == want
    at = mx.array(held)
    assert same(chunkkv.chunkkv_get_kv(state)[0], keys[at])
    assert same(chunkkv.chunkkv_get_kv(state)[1], values[at])
    assert chunkkv.chunkkv_fp16_bytes(state) == 4 * len(held) * D
    assert held[:SINKS] == [0, 1]
    assert held[-1] == 39


def test_heads_of_chunks_do_as_they_do_alone_and_a_layer_follows_another() -> None:
    keys, values, other = rows(3, 40, seed=9), rows(3, 40, seed=10), rows(3, 40, seed=11)
    places = mx.arange(40)
    settings = (SINKS, BUDGET, CHUNK, "attn_mass")
    out = chunkkv.chunkkv_update_batched(
        None, None, None, None, None, keys, values, places, *settings, True
    )
    follower = chunkkv.chunkkv_apply_reuse_indices_batched(
        None, None, None, None, other, values, places, out[5]
    )
    assert out[4].tolist() == follower[3].tolist() == [out[0].shape[1]] * 3
    assert same(out[3], follower[2])
    for head in range(3):
        state, kept = chunkkv.chunkkv_update(chunk_state(), keys[head], values[head], True)
        assert kept == out[5][head]
        assert same(state.keys, out[0][head])
        assert same(state.keys, keys[head][out[3][head]])
        late = chunkkv.chunkkv_apply_reuse_indices(
            chunk_state(), other[head, :20], values[head, :20], kept[:20]
        )
        late = chunkkv.chunkkv_apply_reuse_indices(
            late, other[head, 20:], values[head, 20:], kept[20:]
        )
        assert same(late.keys, other[head][out[3][head]])
        assert same(late.keys, follower[0][head])
        more = chunkkv.chunkkv_update(late, keys[head], values[head])
        assert more.keys.shape[0] <= BUDGET
    with pytest.raises(ValueError, match="one list a head and row"):
        chunkkv.chunkkv_apply_reuse_indices(chunk_state(), keys[0], values[0], [[0]])


def test_fewer_rows_of_chunks_are_sinks_and_the_newest() -> None:
    state = chunkkv.chunkkv_update(chunk_state(), rows(10, seed=12), rows(10, seed=13))
    keys = state.keys
    assert same(chunkkv.chunkkv_trim_to(state, 20).keys, keys)
    fewer = chunkkv.chunkkv_trim_to(state, 5)
    assert same(fewer.keys, keys[mx.array([0, 1, 7, 8, 9])])
    assert fewer.scores.shape == (5,)
    assert chunkkv.chunkkv_trim_to(chunk_state(), 3).keys is None


def test_a_chunk_larger_than_what_sinks_leave_gives_up_all_but_the_newest_row() -> None:
    state = chunkkv.init_chunkkv_state(2, 5, D, 8)
    state, kept = chunkkv.chunkkv_update(state, rows(7, seed=14), rows(7, seed=15), True)
    assert kept[4:] == [[0, 1, 2, 3, 4], [0, 1, 5], [0, 1, 2, 3]]
    for bad in ((0, 5, D, 8), (2, 5, D, 0), (5, 5, D, 1), (2, 5, D, 2, "knorm")):
        with pytest.raises(QuantizerConfigError):
            chunkkv.init_chunkkv_state(*bad)
