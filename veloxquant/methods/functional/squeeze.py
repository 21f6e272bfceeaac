"""squeeze on rows of single heads; keys stand for queries."""

from dataclasses import dataclass

import mlx.core as mx

from veloxquant.cache.selection import select_rows
from veloxquant.methods.functional.collected import (
    CollectedState,
    collected_update,
    collected_update_batched,
)
from veloxquant.methods.functional.rows import (
    HeadRows,
    check_budget,
    full_bytes,
    get_kv,
    held_bytes,
)
from veloxquant.quantizers.squeeze import concentration_score, squeeze_budgets

__all__ = [
    "SqueezeState", "concentration_score", "full_squeeze_fp16_bytes", "init_squeeze_state",
    "squeeze_budgets", "squeeze_fp16_bytes", "squeeze_get_kv", "squeeze_trim_batched",
    "squeeze_update", "squeeze_update_batched",
]  # fmt: skip


@dataclass
class SqueezeState(CollectedState):
    """Rows of one head with the attention they collected."""


def init_squeeze_state(n_sink: int, budget: int, head_dim: int) -> SqueezeState:
    """An empty state.

    Raises:
        QuantizerConfigError: unless n_sink < budget.
    """
    check_budget(n_sink, budget)
    return SqueezeState(n_sink=n_sink, budget=budget, head_dim=head_dim)


def squeeze_update(state: SqueezeState, new_keys: mx.array, new_values: mx.array) -> SqueezeState:
    """Absorb rows (S, D) and drop the lowest sums, sinks and the newest row apart."""
    collected_update(state, new_keys, new_values)
    return state


def squeeze_trim_batched(
    keys: mx.array | None,
    values: mx.array | None,
    scores: mx.array | None,
    n_sink: int,
    budget: int,
) -> tuple[mx.array | None, mx.array | None, mx.array | None]:
    """Bring rows (BH, n, D) to a new budget, as an update without new rows."""
    if keys is None or values is None or scores is None or keys.shape[1] <= budget:
        return keys, values, scores
    held = HeadRows(keys, values, {"mass": scores})
    sinks = min(n_sink, budget)
    held.pick(select_rows(scores[None], budget, sinks, min(1, budget - sinks), later_wins=True))
    return *held.pair(), held.column("mass")


squeeze_update_batched = collected_update_batched
squeeze_get_kv = get_kv
squeeze_fp16_bytes = held_bytes
full_squeeze_fp16_bytes = full_bytes
