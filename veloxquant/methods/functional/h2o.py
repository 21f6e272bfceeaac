"""h2o on rows of single heads; keys stand for queries."""

from dataclasses import dataclass

import mlx.core as mx

from veloxquant.cache.evicting import POSITIONS, Policy
from veloxquant.cache.scorers import CumulativeAttention
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


@dataclass
class H2OState(HeadState):
    """Rows of one head with the attention they collected."""

    scores: mx.array | None = None
    positions: mx.array | None = None
    rope_base: float = 10000.0
    next_pos: int = 0
    grace: int = 0
    decay: float = 1.0


def init_h2o_state(
    n_sink: int,
    budget: int,
    head_dim: int,
    rope_base: float = 10000.0,
    grace: int = 0,
    decay: float = 1.0,
) -> H2OState:
    """An empty state.

    Raises:
        QuantizerConfigError: unless n_sink < budget.
    """
    check_budget(n_sink, budget)
    return H2OState(
        n_sink=n_sink, budget=budget, rope_base=rope_base, grace=grace, decay=decay,
        head_dim=head_dim,
    )  # fmt: skip


def h2o_update(state: H2OState, new_keys: mx.array, new_values: mx.array) -> H2OState:
    """Absorb rows (S, D) and drop the lowest sums outside sinks and the newest rows.

    `grace` newest rows are no candidates, at least one.
    """
    keys, values, scores, positions = lift(state.keys, state.values, state.scores, state.positions)
    out = h2o_update_batched(
        keys, values, scores, positions, new_keys[None], new_values[None], state.n_sink,
        state.budget, state.rope_base, state.next_pos, state.grace, state.decay,
    )  # fmt: skip
    state.keys, state.values, state.scores, state.positions = (a[0] for a in out[:4])
    state.next_pos = out[4]
    return state


def h2o_update_batched(
    keys: mx.array | None,
    values: mx.array | None,
    scores: mx.array | None,
    positions: mx.array | None,
    new_keys: mx.array,
    new_values: mx.array,
    n_sink: int,
    budget: int,
    rope_base: float,
    next_pos: int,
    grace: int = 0,
    decay: float = 1.0,
) -> tuple[mx.array, mx.array, mx.array, mx.array, int]:
    """As `h2o_update` for (BH, n, D) rows; keys, values, scores, positions, next position.

    `rope_base` has no effect: rows keep their rotation.
    """
    del rope_base
    columns = {"mass": scores, POSITIONS: positions}
    held = extended((keys, values), (new_keys, new_values), columns, next_pos)
    policy = Policy(budget, n_sink, max(1, grace), later_wins=True)
    keep = absorb(held, new_keys, CumulativeAttention(decay=decay), policy)
    if keep is not None:
        held.pick(keep)
    following = next_pos + new_keys.shape[1]
    return *held.pair(), held.column("mass"), held.column(POSITIONS), following


h2o_get_kv = get_kv
h2o_fp16_bytes = held_bytes
full_h2o_fp16_bytes = full_bytes
