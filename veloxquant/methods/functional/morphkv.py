"""morphkv on rows of single heads; the newest keys stand for the queries."""

from dataclasses import dataclass

import mlx.core as mx

from veloxquant.cache.evicting import Policy
from veloxquant.cache.scorers import WindowLogits
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
class MorphKVState(HeadState):
    """Rows of one head; `pos` counts all tokens."""

    pos: int = 0
    window: int = 8


def init_morphkv_state(n_sink: int, budget: int, head_dim: int, window: int = 8) -> MorphKVState:
    """An empty state.

    Raises:
        QuantizerConfigError: unless n_sink < budget.
    """
    check_budget(n_sink, budget)
    return MorphKVState(n_sink=n_sink, budget=budget, window=window, head_dim=head_dim)


def morphkv_update(state: MorphKVState, new_keys: mx.array, new_values: mx.array) -> MorphKVState:
    """Absorb rows (S, D) and drop those that the newest rows attend to least."""
    keys, values = lift(state.keys, state.values)
    out = morphkv_update_batched(
        keys, values, new_keys[None], new_values[None], state.n_sink, state.budget, state.window
    )
    state.keys, state.values = (a[0] for a in out[:2])
    state.pos += new_keys.shape[0]
    return state


def morphkv_update_batched(
    keys: mx.array | None,
    values: mx.array | None,
    new_keys: mx.array,
    new_values: mx.array,
    n_sink: int,
    budget: int,
    window: int,
    *,
    return_indices: bool = False,
) -> tuple[mx.array, ...]:
    """As `morphkv_update` for (BH, n, D) rows; with the kept indices (BH, m) if asked."""
    held = extended((keys, values), (new_keys, new_values), {}, 0)
    window = max(1, min(window, budget - n_sink - 1))
    recent = min(window + 1, budget - n_sink)
    scorer = WindowLogits(window, n_sink, recent)
    index = mx.broadcast_to(mx.arange(held.rows, dtype=mx.int32), (new_keys.shape[0], held.rows))
    if held.rows > budget:
        # The newest keys, not only the new ones, are the window.
        newest = held.keys()[0][:, -window:]
        keep = absorb(held, newest, scorer, Policy(budget, n_sink, recent, later_wins=True))
        assert keep is not None
        held.pick(keep)
        index = keep[0]
    return (*held.pair(), index) if return_indices else held.pair()


morphkv_get_kv = get_kv
morphkv_fp16_bytes = held_bytes
full_morphkv_fp16_bytes = full_bytes
