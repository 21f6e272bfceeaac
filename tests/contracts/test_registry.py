"""Every ready row of the method table through one protocol; no method is named here."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import (
    KEEPING,
    Ragged,
    T,
    Tokens,
    attend,
    counters,
    every_row,
    evicting_rows,
    fed,
    feed,
    held_rows,
    new_cache,
    random_tokens,
    roomy_config,
    same,
    same_state,
    shape_of,
    small,
    small_config,
    state_parts,
    worst,
)

from veloxquant.cache.table import MethodRow


def sizes(row: MethodRow) -> tuple[int | None, ...]:
    """Piece sizes; a lone token would end the prompt of a method that judges all of it."""
    scorer = getattr(small(row, random_tokens(1)), "scorer", None)
    whole = row.queries != "none" or (scorer is not None and not scorer.static)
    return (7, 64, None) if whole else (1, 7, 64, None)


def reference(queries: mx.array, keys: mx.array, values: mx.array) -> np.ndarray:
    """Attention of the newest queries with all rows, in float64."""
    q, k, v = (np.array(a.astype(mx.float32), dtype=np.float64) for a in (queries, keys, values))
    repeat = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeat, axis=1), np.repeat(v, repeat, axis=1)
    logits = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    n, total = q.shape[2], k.shape[2]
    logits[..., ~np.tril(np.ones((n, total), dtype=bool), total - n)] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def close(got: mx.array, want: np.ndarray, tolerance: float = 1e-4) -> None:
    assert got.shape == want.shape
    difference = np.abs(np.array(got.astype(mx.float32), dtype=np.float64) - want).max(initial=0)
    assert difference <= tolerance * max(1.0, np.abs(want).max(initial=0)), difference


# ---- how tokens arrive ----------------------------------------------------------------------


@every_row
def test_state_does_not_depend_on_the_pieces_of_the_prompt(row: MethodRow) -> None:
    tokens, last = random_tokens(T, seed=1), random_tokens(3, seed=2)
    states = []
    for size in sizes(row):
        cache = fed(row, tokens, size)
        feed(cache, last, 1)
        states.append(cache)
    for other in states[1:]:
        same_state(states[0], other)


@every_row
def test_a_first_call_of_one_token(row: MethodRow) -> None:
    tokens = random_tokens(40, seed=3)
    cache = small(row, tokens)
    first = attend(cache, tokens.cut(0, 1))
    assert worst(first, mx.repeat(tokens.values[:, :, :1], 2, axis=1)) < 1e-5
    feed(cache, tokens.cut(1, 40))
    assert cache.offset == 40


@every_row
def test_an_empty_append_changes_nothing(row: MethodRow) -> None:
    tokens = random_tokens(50, seed=4)
    cache = small(row, tokens)
    assert attend(cache, tokens.cut(0, 0)).shape == (1, 4, 0, 64)
    assert cache.offset == 0
    feed(cache, tokens)
    assert attend(cache, tokens.cut(0, 0)).shape == (1, 4, 0, 64)
    assert cache.offset == 50
    same_state(cache, fed(row, tokens))


@every_row
def test_future_tokens_do_not_reach_the_past(row: MethodRow) -> None:
    tokens, change = random_tokens(90, seed=5), random_tokens(20, seed=6)
    other = tokens.cut(0, 70).then(change)
    for size in (None, 35):
        a = feed(small(row, tokens), tokens, size)
        b = feed(small(row, other), other, size)
        assert worst(a[:, :, :70], b[:, :, :70]) <= 1e-5, size
        assert worst(a[:, :, 70:], b[:, :, 70:]) > 1e-3, size


# ---- shapes and types -----------------------------------------------------------------------


@every_row
@pytest.mark.parametrize(
    ("k_dim", "v_dim"),
    [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256)],
)
def test_attention_reads_what_is_held_for_every_head_size(
    row: MethodRow, k_dim: int, v_dim: int
) -> None:
    tokens = random_tokens(T, seed=7, heads=1, k_dim=k_dim, v_dim=v_dim)
    cache = small(row, tokens)
    feed(cache, tokens.cut(0, T - 3), 50)
    for at in (T - 3, T - 2, T - 1):
        now = tokens.cut(at, at + 1)
        out = attend(cache, now)
        close(out, reference(now.queries, *held_rows(cache)))


@every_row
@pytest.mark.parametrize("repeat", [1, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 20])
def test_grouped_queries_read_their_own_head(row: MethodRow, repeat: int, length: int) -> None:
    tokens = random_tokens(60 + length, seed=8, heads=3, repeat=repeat)
    cache = small(row, tokens)
    feed(cache, tokens.cut(0, 60))
    now = tokens.cut(60, 60 + length)
    out = attend(cache, now)
    close(out, reference(now.queries, *held_rows(cache)))


@every_row
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_types_out_are_the_types_in(row: MethodRow, dtype: mx.Dtype) -> None:
    tokens = random_tokens(70, seed=9, heads=1, dtype=dtype)
    cache = small(row, tokens)
    out = feed(cache, tokens.cut(0, 69), 23)
    step = attend(cache, tokens.cut(69, 70))
    assert out.dtype == step.dtype == dtype
    assert all(a.dtype == dtype for a in held_rows(cache))
    close(step, reference(tokens.queries[:, :, 69:], *held_rows(cache)), 2e-2)


@every_row
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_large_norms_stay_finite(row: MethodRow, dtype: mx.Dtype) -> None:
    tokens = random_tokens(70, seed=10, heads=1, dtype=dtype, factor=30_000.0)
    assert mx.linalg.norm(tokens.values.astype(mx.float32), axis=-1).min().item() > 65504
    cache = small(row, tokens)
    out = feed(cache, tokens, 23)
    bound = 1.5 * mx.linalg.norm(tokens.values.astype(mx.float32), axis=-1).max().item()
    assert mx.isfinite(out).all().item()
    assert mx.abs(out).max().item() <= bound
    assert all(mx.isfinite(a).all().item() for a in held_rows(cache))


@every_row
def test_zeros_give_zeros(row: MethodRow) -> None:
    zeros = Tokens(*(mx.zeros_like(a) for a in random_tokens(T)))
    cache = small(row, zeros)
    out = feed(cache, zeros, 40)
    assert not mx.abs(out).max().item()
    assert not any(mx.abs(a).max().item() for a in held_rows(cache))


# ---- rewinding ------------------------------------------------------------------------------

CUTS = (0, 1, 22, 37, 86, T)


@pytest.mark.parametrize("n", CUTS)
@pytest.mark.parametrize("row", [r for r in KEEPING if r.trim == "exact"], ids=lambda r: r.name)
def test_an_exact_trim_leaves_the_state_of_the_kept_tokens(row: MethodRow, n: int) -> None:
    tokens, more = random_tokens(T, seed=11), random_tokens(60, seed=12)
    cache = fed(row, tokens)
    assert cache.trim(n) == n
    kept = tokens.cut(0, T - n)
    if n < T:
        same_state(cache, fed(row, kept))
    feed(cache, more, 9)
    same_state(cache, fed(row, kept.then(more), 9))


@pytest.mark.parametrize("n", CUTS)
@pytest.mark.parametrize("row", [r for r in KEEPING if r.trim == "lossy"], ids=lambda r: r.name)
def test_a_lossy_trim_leaves_the_frontiers_of_the_kept_tokens(row: MethodRow, n: int) -> None:
    tokens, more = random_tokens(T, seed=13), random_tokens(60, seed=14)
    cache, kept = fed(row, tokens), tokens.cut(0, T - n)
    cache.commit()
    coded = [worst(a, b) for a, b in zip(held_rows(cache), tokens[1:], strict=True)]
    assert cache.trim(n) == n
    assert cache.offset == T - n
    for extra in (None, more):
        if extra is not None:
            feed(cache, extra, 9)
            kept = kept.then(extra)
        elif n == T:
            continue
        fresh = fed(row, kept, 9)
        tree, arrays = state_parts(cache)
        wanted, fresh_arrays = state_parts(fresh)
        assert tree == wanted
        assert {p: a.shape for p, a in arrays.items()} == {
            p: a.shape for p, a in fresh_arrays.items()
        }
        assert counters(cache) == counters(fresh)
        for now, true, error in zip(held_rows(cache), kept[1:], coded, strict=True):
            # Tokens coded twice may lose twice; other tokens of their group may widen the grid.
            assert worst(now, true) <= (1 if extra is None else 3) * error + 1e-5


@evicting_rows
@pytest.mark.parametrize("n", CUTS)
def test_an_evicting_method_rewinds_exactly_before_it_evicts(row: MethodRow, n: int) -> None:
    tokens, more = random_tokens(T, seed=15), random_tokens(60, seed=16)
    config, shape = roomy_config(row), shape_of(tokens)
    cache, fresh = new_cache(config, shape), new_cache(config, shape)
    # Whoever asks now is going to rewind later, when that may no longer be possible.
    assert not cache.is_trimmable()
    feed(cache, tokens)
    assert cache.is_trimmable()
    assert cache.trim(n) == n
    kept = tokens.cut(0, T - n)
    assert cache.offset == cache.size() == T - n
    if n < T:
        feed(fresh, kept)
        for a, b in zip(held_rows(cache), held_rows(fresh), strict=True):
            assert same(a, b)
    assert worst(feed(cache, more, 9), feed(fresh, more, 9)) < 1e-6
    assert counters(cache) == counters(fresh)


@evicting_rows
def test_nothing_is_rewound_after_an_eviction(row: MethodRow) -> None:
    tokens = random_tokens(T + 1, seed=17)
    cache = small(row, tokens)
    feed(cache, tokens.cut(0, T))
    feed(cache, tokens.cut(T, T + 1))
    assert not cache.is_trimmable()
    before = copy.deepcopy(cache)
    assert cache.trim(5) == 0
    assert cache.offset == T + 1
    same_state(cache, before)


@evicting_rows
def test_a_batch_is_not_rewound_in_parts(row: MethodRow) -> None:
    rows = [random_tokens(T, seed=34), random_tokens(9, seed=35)]
    ragged = Ragged(small_config(row), rows)
    ragged.prompt(T)
    feed(ragged.batch, random_tokens(2, seed=36, batch=2), 1)
    assert ragged.batch.trim(2) == 0
    assert ragged.batch.offset.tolist() == [T + 2, 11]
    assert not ragged.batch.is_trimmable()
