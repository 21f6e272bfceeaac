"""pyramidkv on rows of single heads; keys stand for queries."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from veloxquant.allocators.layer_budgets import pyramid_budgets
from veloxquant.methods.functional.collected import CollectedState, collected_update
from veloxquant.methods.functional.rows import check_budget, full_bytes, get_kv, held_bytes

__all__ = [
    "PyramidState", "full_pyramid_fp16_bytes", "init_pyramid_state", "pyramid_budgets",
    "pyramid_fp16_bytes", "pyramid_get_kv", "pyramid_update", "pyramid_update_heads",
]  # fmt: skip


@dataclass
class PyramidState(CollectedState):
    """Rows of one head with the attention they collected."""


def init_pyramid_state(n_sink: int, budget: int, head_dim: int) -> PyramidState:
    """An empty state.

    Raises:
        QuantizerConfigError: unless n_sink < budget.
    """
    check_budget(n_sink, budget)
    return PyramidState(n_sink=n_sink, budget=budget, head_dim=head_dim)


def pyramid_update(
    state: PyramidState, new_keys: mx.array, new_values: mx.array, *, backend: str = "reference"
) -> PyramidState:
    """Absorb rows (S, D) and drop the lowest sums, sinks and the newest row apart.

    `backend` has no effect: there is one.
    """
    del backend
    collected_update(state, new_keys, new_values)
    return state


def pyramid_update_heads(
    states: Sequence[PyramidState],
    new_keys: mx.array,
    new_values: mx.array,
    *,
    backend: str = "reference",
) -> list[PyramidState]:
    """As `pyramid_update` for every head of (BH, S, D) rows."""
    pairs = zip(states, new_keys, new_values, strict=True)
    return [pyramid_update(s, k, v, backend=backend) for s, k, v in pairs]


pyramid_get_kv = get_kv
pyramid_fp16_bytes = held_bytes
full_pyramid_fp16_bytes = full_bytes
