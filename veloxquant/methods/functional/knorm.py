"""knorm on rows of single heads."""

from dataclasses import dataclass
from typing import Literal, overload

import mlx.core as mx

from veloxquant.cache.evicting import Policy
from veloxquant.cache.scorers import KeyNorm
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.methods.functional.rows import (
    HeadState,
    absorb,
    check_budget,
    extended,
    full_bytes,
    get_kv,
    held_bytes,
)

Norms = tuple[mx.array, mx.array, mx.array]


@dataclass
class KnormState(HeadState):
    """Rows of one head with the lengths of their keys."""

    norms: mx.array | None = None
    recent: int = 0
    keep: str = "low"


def init_knorm_state(
    n_sink: int, budget: int, head_dim: int, recent: int = 0, keep: str = "low"
) -> KnormState:
    """An empty state.

    Raises:
        QuantizerConfigError: unless n_sink < budget and keep is "low" or "high".
    """
    check_budget(n_sink, budget)
    if keep not in ("low", "high"):
        raise QuantizerConfigError(f"keep={keep!r} is not possible; keep must be 'low' or 'high'")
    return KnormState(n_sink=n_sink, budget=budget, recent=recent, keep=keep, head_dim=head_dim)


def knorm_update(state: KnormState, new_keys: mx.array, new_values: mx.array) -> KnormState:
    """Absorb rows (S, D) and keep the best key lengths, sinks and recent rows in any case."""
    none = mx.zeros((0, new_keys.shape[-1]), dtype=new_keys.dtype)
    keys, values, norms = state.keys, state.values, state.norms
    out = knorm_update_batched(
        (none if keys is None else keys)[None],
        (none.astype(new_values.dtype) if values is None else values)[None],
        (mx.zeros((0,)) if norms is None else norms)[None],
        new_keys[None], new_values[None], state.budget, state.n_sink, state.recent, state.keep,
    )  # fmt: skip
    state.keys, state.values, state.norms = (a[0] for a in out)
    return state


@overload
def knorm_update_batched(
    prior_keys: mx.array, prior_values: mx.array, prior_norms: mx.array, new_keys: mx.array,
    new_values: mx.array, budget: int, n_sink: int, recent: int, keep: str, *,
    return_indices: Literal[False] = False,
) -> Norms: ...  # fmt: skip
@overload
def knorm_update_batched(
    prior_keys: mx.array, prior_values: mx.array, prior_norms: mx.array, new_keys: mx.array,
    new_values: mx.array, budget: int, n_sink: int, recent: int, keep: str, *,
    return_indices: Literal[True],
) -> tuple[mx.array, mx.array, mx.array, mx.array]: ...  # fmt: skip
def knorm_update_batched(
    prior_keys: mx.array,
    prior_values: mx.array,
    prior_norms: mx.array,
    new_keys: mx.array,
    new_values: mx.array,
    budget: int,
    n_sink: int,
    recent: int,
    keep: str,
    *,
    return_indices: bool = False,
) -> Norms | tuple[mx.array, mx.array, mx.array, mx.array]:
    """As `knorm_update` for (N, n, D) rows and (N, n) lengths; with the kept indices if asked."""
    scorer = KeyNorm(low=keep == "low")
    columns = {"score": scorer.sign * prior_norms}
    held = extended((prior_keys, prior_values), (new_keys, new_values), dict(columns), 0)
    picked = absorb(held, new_keys, scorer, Policy(budget, n_sink, recent, later_wins=True))
    index = mx.broadcast_to(mx.arange(held.rows, dtype=mx.int32), held.column("score").shape)
    if picked is not None:
        held.pick(picked)
        index = picked[0]
    out = (*held.pair(), scorer.sign * held.column("score"))
    return (*out, index) if return_indices else out


knorm_get_kv = get_kv
knorm_fp16_bytes = held_bytes
full_knorm_fp16_bytes = full_bytes
