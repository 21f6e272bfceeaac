"""tova on rows of one head; the newest key stands for the query."""

from dataclasses import dataclass

import mlx.core as mx

from veloxquant.cache.evicting import Policy
from veloxquant.cache.scorers import LastQuery
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
class TovaState(HeadState):
    """Rows of one head."""


def init_tova_state(n_sink: int, budget: int, head_dim: int) -> TovaState:
    """An empty state.

    Raises:
        QuantizerConfigError: unless n_sink < budget.
    """
    check_budget(n_sink, budget)
    return TovaState(n_sink=n_sink, budget=budget, head_dim=head_dim)


def tova_update(
    state: TovaState, new_keys: mx.array, new_values: mx.array, *, backend: str = "auto"
) -> TovaState:
    """Absorb rows (S, D) and drop what the last one attends to least, sinks and itself apart.

    `backend` has no effect: there is one.
    """
    del backend
    keys, values = lift(state.keys, state.values)
    held = extended((keys, values), (new_keys[None], new_values[None]), {}, 0)
    policy = Policy(state.budget, state.n_sink, 1, later_wins=True)
    keep = absorb(held, new_keys[None], LastQuery(), policy)
    if keep is not None:
        held.pick(keep)
    state.keys, state.values = (a[0] for a in held.pair())
    return state


tova_get_kv = get_kv
tova_fp16_bytes = held_bytes
full_tova_fp16_bytes = full_bytes
