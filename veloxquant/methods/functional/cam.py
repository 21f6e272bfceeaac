"""cam on rows of single heads; keys stand for queries."""

from dataclasses import dataclass
from typing import cast, overload

import mlx.core as mx

from veloxquant.cache.evicting import POSITIONS, Policy
from veloxquant.cache.merging import Losers, Merge, Merger, merge
from veloxquant.cache.scorers import CumulativeAttention
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.methods.functional.rows import (
    HeadState,
    absorb,
    check_budget,
    extended,
    full_bytes,
    get_kv,
    held_bytes,
    lift,
)

MODES = ("sim_weighted", "mean", "sequential", "drop")


@dataclass
class CaMState(HeadState):
    """Rows of one head with the attention they collected."""

    scores: mx.array | None = None
    positions: mx.array | None = None
    merge_mode: str = "sim_weighted"
    merge_keys: bool = False
    merge_gate: bool = True
    seed: int = 0
    draw_count: int = 0
    next_pos: int = 0


def most_similar_survivor(
    evicted_key: mx.array, keys: mx.array, exclude_idx: int, n_sink_eff: int
) -> int:
    """Row of (n, D) with the best cosine to (D,), first rows and one more apart; -1 if none."""
    n = keys.shape[0]
    rows = mx.arange(n)
    allowed = (rows >= n_sink_eff) & (rows != exclude_idx)
    if not allowed.any().item():
        return -1
    keys, evicted_key = keys.astype(mx.float32), evicted_key.astype(mx.float32)
    lengths = mx.linalg.norm(keys, axis=-1) * mx.linalg.norm(evicted_key)
    cosines = keys @ evicted_key / mx.maximum(lengths, 1e-6)
    return cast(int, mx.argmax(mx.where(allowed, cosines, -mx.inf)).item())


def merge_pair(
    k_survivor: mx.array,
    v_survivor: mx.array,
    k_evicted: mx.array,
    v_evicted: mx.array,
    merge_mode: str,
    merge_keys: bool,
) -> tuple[mx.array, mx.array]:
    """Rows (D,) of a survivor with an evicted one in, fp16; keys only if `merge_keys`.

    Raises:
        QuantizerConfigError: for a mode other than sim_weighted, mean and drop.
    """
    if merge_mode not in ("sim_weighted", "mean", "drop"):
        raise QuantizerConfigError(
            f"merge_mode={merge_mode!r} is not possible; it must be one of sim_weighted, mean, drop"
        )
    share = mx.array({"mean": 1.0, "drop": 0.0}.get(merge_mode, 1.0))
    a, b = k_survivor.astype(mx.float32), k_evicted.astype(mx.float32)
    if merge_mode == "sim_weighted":
        lengths = mx.linalg.norm(a) * mx.linalg.norm(b)
        share = mx.maximum((a * b).sum() / mx.maximum(lengths, 1e-6), 0.0)
    value = (v_survivor.astype(mx.float32) + share * v_evicted.astype(mx.float32)) / (1 + share)
    key = (a + share * b) / (1 + share) if merge_keys else a
    return key.astype(mx.float16), value.astype(mx.float16)


def merge_gate_probability(evicted_score: float, survivor_score: float) -> float:
    """Their quotient, from 0 to 1; 1 for a survivor without a score."""
    if survivor_score <= 0:
        return 1.0
    return min(max(evicted_score / survivor_score, 0.0), 1.0)


def sample_merge_gate(probability: float, seed: int, draw_id: int) -> bool:
    """Whether a gate of this probability is open; the same for the same seed and draw."""
    draw = mx.random.uniform(key=mx.random.key((seed << 32) + draw_id))
    return bool((draw < probability).item())


def init_cam_state(
    n_sink: int,
    budget: int,
    head_dim: int,
    merge_mode: str = "sim_weighted",
    merge_keys: bool = False,
    merge_gate: bool = True,
    seed: int = 0,
) -> CaMState:
    """An empty state.

    Raises:
        QuantizerConfigError: unless n_sink < budget and the mode is known.
    """
    check_budget(n_sink, budget)
    if merge_mode not in MODES:
        raise QuantizerConfigError(
            f"merge_mode={merge_mode!r} is not possible; it must be one of {', '.join(MODES)}"
        )
    return CaMState(
        n_sink=n_sink, budget=budget, merge_mode=merge_mode, merge_keys=merge_keys,
        merge_gate=merge_gate, seed=seed, head_dim=head_dim,
    )  # fmt: skip


@overload
def cam_update(
    state: CaMState, new_keys: mx.array, new_values: mx.array, positions: None = None,
    new_positions: None = None,
) -> CaMState: ...  # fmt: skip
@overload
def cam_update(
    state: CaMState, new_keys: mx.array, new_values: mx.array, positions: mx.array | None = None,
    *, new_positions: mx.array,
) -> tuple[CaMState, mx.array | None]: ...  # fmt: skip
def cam_update(
    state: CaMState,
    new_keys: mx.array,
    new_values: mx.array,
    positions: mx.array | None = None,
    new_positions: mx.array | None = None,
) -> CaMState | tuple[CaMState, mx.array | None]:
    """Absorb rows (S, D); rows over the budget are merged into their nearest survivors.

    With `new_positions` (S,) the positions of the kept rows are returned as well; `positions` are
    those of the rows held so far.
    """
    before = state.next_pos
    keys, values, scores, places = lift(state.keys, state.values, state.scores, state.positions)
    out = cam_update_batched(
        keys, values, scores, places, new_keys[None], new_values[None], state.n_sink,
        state.budget, state.merge_mode, state.merge_keys, state.merge_gate, [state.seed],
        before, state.draw_count,
    )  # fmt: skip
    old = state.positions
    state.keys, state.values, state.scores, state.positions = (a[0] for a in out[:4])
    state.next_pos, state.draw_count = out[4], out[5]
    if new_positions is None:
        return state
    known = new_positions
    names = mx.arange(before, before + new_positions.size, dtype=mx.int32)
    if positions is not None and old is not None:
        known, names = mx.concatenate([positions, known]), mx.concatenate([old, names])
    # Our own numbers of the rows say which of the given ones stayed.
    at = mx.argmax(names[None] == state.positions[:, None], axis=-1)
    return state, known[at]


def cam_update_batched(
    keys: mx.array | None,
    values: mx.array | None,
    scores: mx.array | None,
    positions: mx.array | None,
    new_keys: mx.array,
    new_values: mx.array,
    n_sink: int,
    budget: int,
    merge_mode: str,
    merge_keys: bool,
    merge_gate: bool,
    seeds: list[int],
    next_pos: int,
    draw_count: int,
) -> tuple[mx.array, mx.array, mx.array, mx.array, int, int]:
    """As `cam_update` for (BH, n, D) rows, one seed each; also next position and draws made."""
    columns = {"mass": scores, POSITIONS: positions}
    held = extended((keys, values), (new_keys, new_values), columns, next_pos)
    following = next_pos + new_keys.shape[1]
    keep = absorb(held, new_keys, CumulativeAttention(), Policy(budget, n_sink, 1, later_wins=True))
    if keep is None:
        out = (*held.pair(), held.column("mass"), held.column(POSITIONS))
        return *out, following, draw_count

    def gate(losers: Losers, probability: mx.array) -> mx.array:
        if not merge_gate:
            return mx.ones(probability.shape)
        first = draw_count + losers.first
        draws = [
            mx.random.uniform(shape=probability.shape[2:], key=mx.random.key((seed << 32) + first))
            for seed in seeds
        ]
        return (mx.stack(draws)[None] < probability).astype(mx.float32)

    gone = held.rows - budget
    if merge_mode == "drop":
        held.pick(keep)
        out = (*held.pair(), held.column("mass"), held.column(POSITIONS))
        return *out, following, draw_count
    how = Merger(cast(Merge, merge_mode), n_sink, gate, _as_they_are if merge_keys else None)
    merged = merge(held.keys(), held.values(), held.columns["mass"], keep, how)
    held.pick(keep)
    out = (merged.keys[0], merged.values[0], merged.scores[0], held.column(POSITIONS))
    return *out, following, draw_count + gone


def _as_they_are(lost: mx.array, losers: Losers, target: mx.array) -> mx.array:
    """Keys of single heads carry no known rotation to turn."""
    del losers, target
    return lost


cam_get_kv = get_kv
cam_fp16_bytes = held_bytes
full_cam_fp16_bytes = full_bytes
