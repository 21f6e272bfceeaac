"""curdkv on rows of single heads."""

from dataclasses import dataclass

import mlx.core as mx

from veloxquant.cache.evicting import POSITIONS, Policy
from veloxquant.cache.leverage import ValueLeverage
from veloxquant.config.checks.eviction_pages import CURDKV_RECENT
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
from veloxquant.quantizers.a2ats_rope import PositionCode


@dataclass
class CurDKVState(HeadState):
    """Rows of one head with their leverages; `n_updates` counts how often each was rated."""

    leverage_scores: mx.array | None = None
    n_updates: mx.array | None = None
    positions: mx.array | None = None
    rank_cap: int = 16
    rope_base: float = 10000.0
    next_pos: int = 0


def init_curdkv_state(
    n_sink: int, budget: int, head_dim: int, rank_cap: int = 16, rope_base: float = 10000.0
) -> CurDKVState:
    """An empty state.

    Raises:
        QuantizerConfigError: unless n_sink < budget.
    """
    check_budget(n_sink, budget)
    return CurDKVState(
        n_sink=n_sink, budget=budget, rank_cap=rank_cap, rope_base=rope_base, head_dim=head_dim
    )


def curdkv_update(state: CurDKVState, new_keys: mx.array, new_values: mx.array) -> CurDKVState:
    """Absorb rows (S, D) and drop the lowest leverages outside sinks and the newest rows."""
    keys, values, scores, counts, places = lift(
        state.keys, state.values, state.leverage_scores, state.n_updates, state.positions
    )
    out = curdkv_update_batched(
        keys, values, scores, counts, places, new_keys[None], new_values[None], state.n_sink,
        state.budget, state.rank_cap, state.rope_base, state.next_pos,
    )  # fmt: skip
    state.keys, state.values, state.leverage_scores = (a[0] for a in out[:3])
    state.n_updates, state.positions = out[3][0], out[4][0]
    state.next_pos = out[5]
    return state


def curdkv_update_batched(
    keys: mx.array | None,
    values: mx.array | None,
    leverage_scores: mx.array | None,
    n_updates: mx.array | None,
    positions: mx.array | None,
    new_keys: mx.array,
    new_values: mx.array,
    n_sink: int,
    budget: int,
    rank_cap: int,
    rope_base: float,
    next_pos: int,
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, int]:
    """As `curdkv_update` for (BH, n, D) rows.

    All rows held are rated again at each call, under directions of their own.
    """
    del leverage_scores
    count, dim = new_keys.shape[1:]
    fresh = mx.zeros(new_keys.shape[:2], dtype=mx.int32)
    rated = fresh if n_updates is None else mx.concatenate([n_updates, fresh], axis=-1)
    columns = {POSITIONS: positions}
    held = extended((keys, values), (new_keys, new_values), columns, next_pos)
    held.columns["rated"] = rated[None] + 1
    scorer = ValueLeverage(
        min(rank_cap, dim, new_values.shape[-1]), PositionCode.of(None, dim, rope_base, None)
    )
    keep = absorb(held, new_keys, scorer, Policy(budget, n_sink, CURDKV_RECENT))
    if keep is not None:
        held.pick(keep)
    scores, counts, places = (held.column(n) for n in ("leverage", "rated", POSITIONS))
    return *held.pair(), scores, counts, places, next_pos + count


curdkv_get_kv = get_kv
curdkv_fp16_bytes = held_bytes
full_curdkv_fp16_bytes = full_bytes
