"""chunkkv: whole runs stay, which ones, and layers that follow the first of their group."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import Tokens, attend, feed, held_rows, new_cache, random_tokens, same, shape_of

from veloxquant.cache.builder import build_layer
from veloxquant.cache.chunks import best_chunks
from veloxquant.cache.context import LayerContext
from veloxquant.cache.coordinators import groups_for
from veloxquant.cache.layouts.eviction_prompt import ChunkRule
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import ChunkKVOptions
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.methods.chunkkv import layer_groups

WINDOW, CHUNK, BUDGET = 32, 4, 60


def config(**fields) -> KVCacheConfig:
    settings = {"chunkkv_budget": BUDGET, "chunkkv_chunk_size": CHUNK, **fields}
    return KVCacheConfig(method="chunkkv", options=ChunkKVOptions(**settings))


def end_prompt(cache, tokens: Tokens, size: int | None = None):
    """Feed all tokens, the last one alone, and let rows go."""
    feed(cache, tokens.cut(0, tokens.length - 1), size)
    attend(cache, tokens.cut(tokens.length - 1, tokens.length))
    cache.commit()
    return cache


def compressed(tokens: Tokens, size: int | None = None, **fields):
    return end_prompt(new_cache(config(**fields), shape_of(tokens)), tokens, size)


def layers(tokens: list[Tokens], reuse: int) -> list:
    """Caches of layers as a model's, in their groups."""
    one = config(chunkkv_reuse_layers=reuse)
    shapes = [shape_of(t) for t in tokens]
    groups = groups_for(lambda n: layer_groups(one, n), shapes, [None] * len(tokens))
    return [
        build_layer(one, shapes[i], LayerContext(i, len(tokens), views=True, group=groups[i]))
        for i in range(len(tokens))
    ]


@pytest.mark.parametrize("length", [61, 93, 94, 95, 96, 130])
def test_whole_runs_within_the_budget(length: int) -> None:
    tokens = random_tokens(length, seed=length, batch=2)
    cache = compressed(tokens, 40)
    places = np.array(cache.kept_positions())
    assert places.shape[:2] == (2, 1)
    assert BUDGET - CHUNK < places.shape[-1] == cache.size() <= BUDGET
    stop = (length - WINDOW) // CHUNK * CHUNK
    for row in places[:, 0]:
        assert (np.diff(row) > 0).all()
        assert set(range(CHUNK)) <= set(row.tolist())
        assert set(range(stop, length)) <= set(row.tolist())
        _, counts = np.unique(row[row < stop] // CHUNK, return_counts=True)
        assert (counts == CHUNK).all()
    keys = np.take_along_axis(np.array(tokens.keys), places[..., None], axis=2)
    assert np.array_equal(np.array(held_rows(cache)[0]), keys)
    assert same(compressed(tokens).kept_positions(), cache.kept_positions())
    assert cache.fidelity == "exact"


def test_up_to_the_budget_nothing_goes() -> None:
    tokens = random_tokens(BUDGET, seed=1)
    cache = compressed(tokens)
    assert cache.evicted == 0
    assert same(held_rows(cache)[0], tokens.keys)


def test_scores_are_the_attention_of_the_window_over_all_heads() -> None:
    tokens = random_tokens(100, seed=2)
    cache = compressed(tokens)
    q, k = (np.array(a, dtype=np.float64) for a in tokens[:2])
    logits = q[:, :, -WINDOW:] @ np.repeat(k, 2, axis=1).swapaxes(-1, -2) / 8
    logits[..., ~np.tril(np.ones((WINDOW, 100), bool), 100 - WINDOW)] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    mass = (weights / weights.sum(-1, keepdims=True)).sum(axis=(0, 1, 2))
    runs = mass[CHUNK : 100 - WINDOW].reshape(-1, CHUNK).mean(axis=-1)
    wanted = sorted(np.argsort(-runs)[: (BUDGET - WINDOW - CHUNK) // CHUNK] + 1)
    kept = np.array(cache.kept_positions())[0, 0, CHUNK:-WINDOW]
    assert (kept[::CHUNK] // CHUNK).tolist() == wanted


def test_a_wanted_token_keeps_its_run() -> None:
    tokens = random_tokens(120, seed=3, heads=1, repeat=1)
    keys = mx.array(tokens.keys)
    keys[:, :, 50] = 40 * tokens.queries[:, :, -8:].mean(axis=2)
    places = compressed(tokens._replace(keys=keys)).kept_positions().reshape(-1).tolist()
    assert {48, 49, 50, 51} <= set(places)


def test_runs_of_one_token_are_the_best_tokens() -> None:
    scores = mx.random.normal((2, 1, 50), key=mx.random.key(4))
    keep = np.array(best_chunks(ChunkRule(1, 3, 8), scores, 20))
    for row, own in zip(keep[:, 0], np.array(scores)[:, 0], strict=True):
        best = np.argsort(-own[3:42])[:9] + 3
        assert row.tolist() == [0, 1, 2, *sorted(best.tolist()), *range(42, 50)]


@pytest.mark.parametrize("score", ["key_norm", "keydiff"])
def test_runs_that_change_places_are_kept_all_the_same(score: str) -> None:
    tokens = random_tokens(96, seed=5)
    order = [0, *(1 + np.random.default_rng(6).permutation(15)).tolist()]
    rows = [4 * run + i for run in order for i in range(4)] + list(range(64, 96))
    moved = Tokens(*(mx.take(a, mx.array(rows), axis=2) for a in tokens))
    one = compressed(tokens, chunkkv_score=score).kept_positions()[0, 0].tolist()
    other = compressed(moved, chunkkv_score=score).kept_positions()[0, 0].tolist()
    assert sorted(rows[i] for i in other) == one
    assert len(one) == BUDGET


def test_without_queries_it_says_so() -> None:
    tokens = random_tokens(100, seed=7)
    cache = end_prompt(new_cache(config(), shape_of(tokens), views=False), tokens)
    assert (cache.fidelity, cache.size()) == ("proxy", BUDGET)
    geometry = end_prompt(
        new_cache(config(chunkkv_score="keydiff"), shape_of(tokens), views=False), tokens
    )
    assert geometry.fidelity == "exact"
    assert same(geometry.kept_positions(), cache.kept_positions())


# ---- layers that follow ---------------------------------------------------------------------


def places_of(tokens: list[Tokens], reuse: int) -> list[list[int]]:
    caches = layers(tokens, reuse)
    for cache, own in zip(caches, tokens, strict=True):
        feed(cache, own.cut(0, own.length - 1))
    for cache, own in zip(caches, tokens, strict=True):
        attend(cache, own.cut(own.length - 1, own.length))
    for cache in caches:
        cache.commit()
    assert not any(c.board.notes for c in caches if c.board.size == reuse)
    return [c.kept_positions().reshape(-1).tolist() for c in caches]


def test_layers_of_a_group_keep_what_its_first_keeps() -> None:
    tokens = [random_tokens(100, seed=10 + i) for i in range(5)]
    alone, pairs = places_of(tokens, 1), places_of(tokens, 2)
    assert len({tuple(p) for p in alone}) == 5
    assert pairs == [alone[0], alone[0], alone[2], alone[2], alone[4]]
    louder = [*tokens]
    louder[1] = random_tokens(100, seed=99)
    assert places_of(louder, 2) == pairs


def test_only_the_first_of_a_group_leads() -> None:
    tokens = [random_tokens(1)] * 4
    assert [c.is_index_reuse_leader for c in layers(tokens, 2)] == [True, False] * 2
    assert not any(c.is_index_reuse_leader for c in layers(tokens, 1))


def test_copies_follow_their_own_leader() -> None:
    tokens = [random_tokens(100, seed=20), random_tokens(100, seed=21)]
    caches = layers(tokens, 2)
    twins = copy.deepcopy(caches)
    other = random_tokens(100, seed=22)
    for i in (0, 1):
        end_prompt(caches[i], tokens[i])
        end_prompt(twins[i], (other, tokens[1])[i])
    kept = [c.kept_positions() for c in (*caches, *twins)]
    assert same(kept[0], kept[1])
    assert same(kept[2], kept[3])
    assert not same(kept[0], kept[2])


def test_a_follower_without_its_leader_chooses_by_itself() -> None:
    tokens = [random_tokens(100, seed=23), random_tokens(100, seed=24)]
    follower = layers(tokens, 2)[1]
    end_prompt(follower, tokens[1])
    assert same(follower.kept_positions(), compressed(tokens[1]).kept_positions())


def test_a_budget_without_room_for_a_run_is_refused() -> None:
    with pytest.raises(QuantizerConfigError, match="chunkkv_budget=40"):
        compressed(random_tokens(1), chunkkv_budget=40)
