"""kvzip on rows of single heads; keys stand for the queries of the context."""

from dataclasses import dataclass

import mlx.core as mx

from veloxquant.cache.evicting import Policy
from veloxquant.config.checks.eviction_pages import KVZIP_NEIGHBOURS
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
from veloxquant.methods.kvzip import StrongestAttention


@dataclass
class KVzipState(HeadState):
    """Rows of one head; `pos` counts all tokens."""

    pos: int = 0
    probe: str = "context"


def init_kvzip_state(n_sink: int, budget: int, head_dim: int, probe: str = "context") -> KVzipState:
    """An empty state.

    Raises:
        QuantizerConfigError: unless n_sink < budget and the probe is "context": a repetition takes
            a model.
    """
    check_budget(n_sink, budget)
    _only_context(probe)
    return KVzipState(n_sink=n_sink, budget=budget, probe=probe, head_dim=head_dim)


def _only_context(probe: str) -> None:
    if probe != "context":
        raise QuantizerConfigError(
            f"probe={probe!r} is not possible on rows alone; probe must be 'context'"
        )


def kvzip_update(state: KVzipState, new_keys: mx.array, new_values: mx.array) -> KVzipState:
    """Absorb rows (S, D) and drop those that no held key attends to strongly."""
    keys, values = lift(state.keys, state.values)
    out = kvzip_update_batched(
        keys, values, new_keys[None], new_values[None], state.n_sink, state.budget, state.probe
    )
    state.keys, state.values = (a[0] for a in out[:2])
    state.pos += new_keys.shape[0]
    return state


def kvzip_update_batched(
    keys: mx.array | None,
    values: mx.array | None,
    new_keys: mx.array,
    new_values: mx.array,
    n_sink: int,
    budget: int,
    probe: str,
    *,
    return_indices: bool = False,
) -> tuple[mx.array, ...]:
    """As `kvzip_update` for (BH, n, D) rows; with the kept indices (BH, m) if asked.

    All rows held ask again at each call: no scores are kept.
    """
    _only_context(probe)
    held = extended((keys, values), (new_keys, new_values), {}, 0)
    index = mx.broadcast_to(mx.arange(held.rows, dtype=mx.int32), (new_keys.shape[0], held.rows))
    if held.rows > budget:
        policy = Policy(budget, n_sink, KVZIP_NEIGHBOURS)
        keep = absorb(held, held.keys()[0], StrongestAttention(), policy)
        assert keep is not None
        held.pick(keep)
        index = keep[0]
    return (*held.pair(), index) if return_indices else held.pair()


kvzip_get_kv = get_kv
kvzip_fp16_bytes = held_bytes
full_kvzip_fp16_bytes = full_bytes
