"""Rows of heads that stay by the attention they collected, for budgets that differ by layer."""

from dataclasses import dataclass

import mlx.core as mx

from veloxquant.cache.evicting import Policy
from veloxquant.cache.scorers import CumulativeAttention
from veloxquant.methods.functional.rows import HeadState, absorb, extended, lift


@dataclass
class CollectedState(HeadState):
    """Rows of one head with the attention they collected."""

    scores: mx.array | None = None


def collected_update_batched(
    keys: mx.array | None,
    values: mx.array | None,
    scores: mx.array | None,
    new_keys: mx.array,
    new_values: mx.array,
    n_sink: int,
    budget: int,
) -> tuple[mx.array, mx.array, mx.array]:
    """Absorb rows (BH, S, D) and drop the lowest sums, sinks and the newest row apart."""
    held = extended((keys, values), (new_keys, new_values), {"mass": scores}, 0)
    policy = Policy(budget, n_sink, 1, later_wins=True)
    keep = absorb(held, new_keys, CumulativeAttention(), policy)
    if keep is not None:
        held.pick(keep)
    return *held.pair(), held.column("mass")


def collected_update(
    state: CollectedState, new_keys: mx.array, new_values: mx.array
) -> CollectedState:
    """As `collected_update_batched` for one head's rows (S, D); the same state."""
    keys, values, scores = lift(state.keys, state.values, state.scores)
    out = collected_update_batched(
        keys, values, scores, new_keys[None], new_values[None], state.n_sink, state.budget
    )
    state.keys, state.values, state.scores = (a[0] for a in out)
    return state
