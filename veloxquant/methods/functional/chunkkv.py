"""chunkkv on rows of single heads; keys stand for queries.

Rows are absorbed one at a time, however they are cut into calls: once there is one too many, the
chunk of lowest mean score goes, never the one that the newest row is in. So all heads of a call
hold equally many rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import mlx.core as mx
import numpy as np

from veloxquant.cache.evicting import POSITIONS
from veloxquant.cache.scorers import CumulativeAttention, KeyNorm, key_difference
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.methods.functional.rows import (
    HeadRows,
    HeadState,
    check_budget,
    extended,
    full_bytes,
    get_kv,
    held_bytes,
    lift,
)

Chunk = tuple[int, int]
KeptLists = list[list[int]]
HeadArrays = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]
"""Keys, values (BH, n, D), scores, positions (BH, n) and lengths (BH,)."""
COLUMNS = {"attn_mass": "mass", "key_norm": "score", "keydiff": "difference"}


def chunk_partition(seq_len: int, chunk_size: int, n_sink: int) -> tuple[list[int], list[Chunk]]:
    """Positions of the sinks, and (start, stop) of the chunks after them; the last may be short."""
    sinks = min(n_sink, seq_len)
    starts = range(sinks, seq_len, chunk_size)
    return list(range(sinks)), [(i, min(i + chunk_size, seq_len)) for i in starts]


def chunk_scores(token_scores: mx.array, body_chunks: list[Chunk]) -> mx.array:
    """Mean score of each chunk, fp32 (n_chunks,)."""
    scores = token_scores.astype(mx.float32)
    means = [scores[start:stop].mean() for start, stop in body_chunks]
    return mx.stack(means) if means else mx.zeros(0)


def chunkkv_keep_mask(
    token_scores: mx.array, seq_len: int, chunk_size: int, n_sink: int, budget: int
) -> mx.array:
    """Which rows stay, bool (seq_len,): sinks, then whole chunks by score while they fit.

    Raises:
        QuantizerConfigError: unless n_sink < budget.
    """
    check_budget(n_sink, budget)
    keep = np.zeros(seq_len, dtype=bool)
    sinks, chunks = chunk_partition(seq_len, chunk_size, n_sink)
    keep[sinks] = True
    room = budget - len(sinks)
    for i in np.argsort(-np.array(chunk_scores(token_scores, chunks)), kind="stable"):
        start, stop = chunks[i]
        if stop - start <= room:
            keep[start:stop] = True
            room -= stop - start
    return mx.array(keep)


# ---- absorbing -------------------------------------------------------------------------------


@dataclass
class ChunkKVState(HeadState):
    """Rows of one head, (n, D) each, and their scores (n,)."""

    scores: mx.array | None = None
    chunk_size: int = 8
    score_mode: str = "attn_mass"


def init_chunkkv_state(
    n_sink: int, budget: int, head_dim: int, chunk_size: int = 8, score_mode: str = "attn_mass"
) -> ChunkKVState:
    """An empty state.

    Raises:
        QuantizerConfigError: unless n_sink < budget, a chunk fits, and the score is known.
    """
    _check(n_sink, budget, chunk_size, score_mode)
    return ChunkKVState(
        n_sink=n_sink, budget=budget, chunk_size=chunk_size, score_mode=score_mode,
        head_dim=head_dim,
    )  # fmt: skip


def _check(n_sink: int, budget: int, chunk_size: int, score_mode: str) -> None:
    check_budget(n_sink, budget)
    if chunk_size < 1 or (not n_sink and chunk_size > budget):
        raise QuantizerConfigError(
            f"chunk_size={chunk_size} is not possible; a chunk has at least 1 row, and without "
            f"sinks at most budget={budget}"
        )
    if score_mode not in COLUMNS:
        raise QuantizerConfigError(f"score_mode={score_mode!r}; it is one of {tuple(COLUMNS)}")


def _scored(held: HeadRows, new_keys: mx.array, mode: str) -> None:
    """Give the column of scores its entries for the newest rows."""
    fresh = new_keys[None]
    if mode == "keydiff":
        held.columns[COLUMNS[mode]] = key_difference(held.keys())
    elif mode == "key_norm":
        KeyNorm().append(held, fresh)
    else:
        scorer = CumulativeAttention()
        scorer.append(held, fresh)
        scorer.observe(held, fresh, new_keys.shape[-1] ** -0.5)
        scorer.score(held)


def _without_worst_chunk(scores: mx.array, n_sink: int, chunk_size: int) -> mx.array:
    """Ascending indices (BH, m) of what stays of (BH, n) rows when one chunk goes."""
    heads, n = scores.shape
    full = (n - n_sink - 1) // chunk_size
    if full == 0:
        # All rows but the sinks are the newest one's chunk; it stays.
        keep = mx.array([*range(n_sink), n - 1], dtype=mx.int32)
        return mx.broadcast_to(keep, (heads, n_sink + 1))
    body = scores[:, n_sink : n_sink + full * chunk_size]
    worst = mx.argmin(body.reshape(heads, full, chunk_size).mean(axis=-1), axis=-1)
    start = n_sink + chunk_size * worst.astype(mx.int32)
    index = mx.arange(n - chunk_size, dtype=mx.int32)
    return mx.where(index >= start[:, None], index + chunk_size, index)


@overload
def chunkkv_update_batched(
    keys: mx.array | None, values: mx.array | None, scores: mx.array | None,
    positions: mx.array | None, lengths: mx.array | None, new_keys: mx.array,
    new_values: mx.array, new_positions: mx.array, n_sink: int, budget: int, chunk_size: int,
    score_mode: str, record_kept_positions: Literal[False] = False,
) -> HeadArrays: ...  # fmt: skip
@overload
def chunkkv_update_batched(
    keys: mx.array | None, values: mx.array | None, scores: mx.array | None,
    positions: mx.array | None, lengths: mx.array | None, new_keys: mx.array,
    new_values: mx.array, new_positions: mx.array, n_sink: int, budget: int, chunk_size: int,
    score_mode: str, record_kept_positions: Literal[True],
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, list[KeptLists]]: ...  # fmt: skip
def chunkkv_update_batched(
    keys: mx.array | None,
    values: mx.array | None,
    scores: mx.array | None,
    positions: mx.array | None,
    lengths: mx.array | None,
    new_keys: mx.array,
    new_values: mx.array,
    new_positions: mx.array,
    n_sink: int,
    budget: int,
    chunk_size: int,
    score_mode: str,
    record_kept_positions: bool = False,
) -> HeadArrays | tuple[mx.array, mx.array, mx.array, mx.array, mx.array, list[KeptLists]]:
    """Absorb rows (BH, S, D) at positions (BH, S) or (S,) into those of BH heads.

    `lengths` (BH,) are the rows held, the same for all heads. With `record_kept_positions` also a
    list of indices a head and token: which of the rows before it, and the token itself, stayed.

    Raises:
        QuantizerConfigError: for settings that cannot work together.
    """
    _check(n_sink, budget, chunk_size, score_mode)
    del lengths  # heads hold equally many rows
    column = COLUMNS[score_mode]
    heads, count = new_keys.shape[:2]
    placed = mx.broadcast_to(new_positions.astype(mx.int32), (heads, count))
    kept: list[KeptLists] = [[] for _ in range(heads)]
    if keys is not None and scores is None:  # rows that another layer chose
        old = mx.linalg.norm(keys.astype(mx.float32), axis=-1)
        scores = -old if score_mode == "key_norm" else mx.zeros_like(old)
    start = 0
    while start < count:
        rows = keys.shape[1] if keys is not None else 0
        stop = min(count, start + max(1, budget + 1 - rows))
        fresh = new_keys[:, start:stop]
        held = extended((keys, values), (fresh, new_values[:, start:stop]), {column: scores}, 0)
        at = placed[:, start:stop]
        at = at if positions is None else mx.concatenate([positions, at], axis=-1)
        held.columns[POSITIONS] = at[None]
        _scored(held, fresh, score_mode)
        total, index = held.rows, None
        if total > budget:
            index = _without_worst_chunk(held.column(column), min(n_sink, budget), chunk_size)
            held.pick(index[None])
        if record_kept_positions:
            last = index.tolist() if index is not None else [list(range(total))] * heads
            for head, lists in enumerate(kept):
                lists.extend(list(range(n)) for n in range(total - (stop - start) + 1, total))
                lists.append(last[head])  # type: ignore[index]
        (keys, values), scores = held.pair(), held.column(column)
        positions = held.column(POSITIONS)
        start = stop
    if keys is None or values is None or scores is None or positions is None:
        keys, values = new_keys, new_values
        scores, positions = mx.zeros((heads, 0)), placed
    out = (keys, values, scores, positions, mx.full((heads,), keys.shape[1], dtype=mx.int32))
    return (*out, kept) if record_kept_positions else out


@overload
def chunkkv_update(
    state: ChunkKVState, new_keys: mx.array, new_values: mx.array,
    record_kept_positions: Literal[False] = False,
) -> ChunkKVState: ...  # fmt: skip
@overload
def chunkkv_update(
    state: ChunkKVState, new_keys: mx.array, new_values: mx.array,
    record_kept_positions: Literal[True],
) -> tuple[ChunkKVState, KeptLists]: ...  # fmt: skip
def chunkkv_update(
    state: ChunkKVState,
    new_keys: mx.array,
    new_values: mx.array,
    record_kept_positions: bool = False,
) -> ChunkKVState | tuple[ChunkKVState, KeptLists]:
    """As `chunkkv_update_batched` for one head's rows (S, D); the same state."""
    keys, values, scores = lift(state.keys, state.values, state.scores)
    rows, places = _unplaced(state, new_keys)
    out = chunkkv_update_batched(
        keys, values, scores, rows, None, new_keys[None], new_values[None], places, state.n_sink,
        state.budget, state.chunk_size, state.score_mode, record_kept_positions=True,
    )  # fmt: skip
    state.keys, state.values, state.scores = (a[0] for a in out[:3])
    return (state, out[5][0]) if record_kept_positions else state


def _unplaced(state: ChunkKVState, new_keys: mx.array) -> tuple[mx.array | None, mx.array]:
    """Positions of old and new rows, for a state that keeps none: zeros."""
    old = None if state.keys is None else mx.zeros((1, state.keys.shape[0]), dtype=mx.int32)
    return old, mx.zeros((new_keys.shape[0],), dtype=mx.int32)


# ---- taking over another layer's choice ------------------------------------------------------


def chunkkv_apply_reuse_indices(
    state: ChunkKVState, new_keys: mx.array, new_values: mx.array, kept_positions: KeptLists
) -> ChunkKVState:
    """Absorb rows (S, D) and keep after each what another layer kept there; the same state.

    Raises:
        ValueError: when there is not one list for every row.
    """
    keys, values = lift(state.keys, state.values)
    rows, places = _unplaced(state, new_keys)
    out = chunkkv_apply_reuse_indices_batched(
        keys, values, rows, None, new_keys[None], new_values[None], places, [kept_positions]
    )
    state.keys, state.values = out[0][0], out[1][0]
    state.scores = None
    return state


def chunkkv_apply_reuse_indices_batched(
    keys: mx.array | None,
    values: mx.array | None,
    positions: mx.array | None,
    lengths: mx.array | None,
    new_keys: mx.array,
    new_values: mx.array,
    new_positions: mx.array,
    kept_positions_per_row: Sequence[KeptLists],
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """As `chunkkv_apply_reuse_indices` for (BH, S, D): keys, values, positions and lengths.

    Raises:
        ValueError: when there is not one list for every head and row, or heads keep unequal
            numbers.
    """
    del lengths  # heads hold equally many rows
    heads, count = new_keys.shape[:2]
    if [len(lists) for lists in kept_positions_per_row] != [count] * heads:
        raise ValueError(
            f"kept positions of {[len(lists) for lists in kept_positions_per_row]} tokens for "
            f"{heads} heads of {count} new rows; give one list a head and row"
        )
    held = extended((keys, values), (new_keys, new_values), {}, 0)
    placed = mx.broadcast_to(new_positions.astype(mx.int32), (heads, count))
    placed = placed if positions is None else mx.concatenate([positions, placed], axis=-1)
    held.columns[POSITIONS] = placed[None]
    before = held.rows - count
    # Which of all these rows are left after the last one: lists of indices into lists.
    left = [list(range(before)) for _ in range(heads)]
    for head, lists in enumerate(kept_positions_per_row):
        for i, kept in enumerate(lists):
            left[head] = [[*left[head], before + i][j] for j in kept]
    if len({len(rows) for rows in left}) > 1:
        raise ValueError(f"heads would keep {[len(rows) for rows in left]} rows; give all as many")
    held.pick(mx.array(left, dtype=mx.int32)[None])
    lengths = mx.full((heads,), held.rows, dtype=mx.int32)
    return *held.pair(), held.column(POSITIONS), lengths


# ---- fewer rows ------------------------------------------------------------------------------


def chunkkv_trim_to(state: ChunkKVState, n: int) -> ChunkKVState:
    """At most `n` rows: sinks and the newest others; the same state."""
    if state.keys is None or state.values is None:
        return state
    keys, values, scores = lift(state.keys, state.values, state.scores)
    assert keys is not None
    assert values is not None
    places = mx.zeros(keys.shape[:2], dtype=mx.int32)
    rows = mx.array([keys.shape[1]])
    out = chunkkv_trim_batched(keys, values, scores, places, rows, state.n_sink, n)
    state.keys, state.values = out[0][0], out[1][0]
    state.scores = out[2][0] if out[2] is not None else None
    return state


def chunkkv_trim_batched(
    keys: mx.array,
    values: mx.array,
    scores: mx.array | None,
    positions: mx.array,
    lengths: mx.array,
    n_sink: int,
    target: int,
) -> tuple[mx.array, mx.array, mx.array | None, mx.array, mx.array]:
    """As `chunkkv_trim_to` for (BH, n, D)."""
    rows = keys.shape[1]
    if rows <= target:
        return keys, values, scores, positions, lengths
    sinks = min(n_sink, target)
    at = mx.array([*range(sinks), *range(rows - (target - sinks), rows)], dtype=mx.int32)
    fewer = scores[:, at] if scores is not None else None
    return keys[:, at], values[:, at], fewer, positions[:, at], mx.full(lengths.shape, target)


chunkkv_get_kv = get_kv
chunkkv_fp16_bytes = held_bytes
full_chunkkv_fp16_bytes = full_bytes
