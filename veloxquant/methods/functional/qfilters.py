"""qfilters on rows of single heads: a given filter, or one against the first keys."""

from typing import Literal, overload

import mlx.core as mx

from veloxquant.cache.evicting import Policy
from veloxquant.cache.qfilters_calibration import compute_qfilters
from veloxquant.cache.selection import select_rows
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.methods.functional.qfilters_state import QFiltersState
from veloxquant.methods.functional.rows import (
    HeadRows,
    check_budget,
    full_bytes,
    get_kv,
    held_bytes,
)
from veloxquant.methods.qfilters import QueryDirection


def init_qfilters_state(
    n_sink: int,
    budget: int,
    head_dim: int,
    recent: int = 0,
    calib_tokens: int = 128,
    sign: int = 1,
    filter_dir: mx.array | None = None,
) -> QFiltersState:
    """An empty state.

    Raises:
        QuantizerConfigError: unless n_sink < budget and sign is 1 or -1.
    """
    check_budget(n_sink, budget)
    if sign not in (1, -1):
        raise QuantizerConfigError(f"sign={sign!r} is not possible; sign must be 1 or -1")
    return QFiltersState(
        n_sink=n_sink, budget=budget, head_dim=head_dim, recent=recent,
        calib_tokens=calib_tokens, sign=sign, filter_dir=filter_dir,
    )  # fmt: skip


def estimate_filter_dir(keys: mx.array) -> mx.array:
    """The direction (D,) that the keys (N, D) share, unit length, most keys along it."""
    return compute_qfilters(keys[None])[0]


@overload
def qfilters_update(
    state: QFiltersState, new_keys: mx.array, new_values: mx.array, *,
    return_indices: Literal[False] = False,
) -> QFiltersState: ...  # fmt: skip
@overload
def qfilters_update(
    state: QFiltersState, new_keys: mx.array, new_values: mx.array, *,
    return_indices: Literal[True],
) -> tuple[QFiltersState, mx.array]: ...  # fmt: skip
def qfilters_update(
    state: QFiltersState,
    new_keys: mx.array,
    new_values: mx.array,
    *,
    return_indices: bool = False,
) -> QFiltersState | tuple[QFiltersState, mx.array]:
    """Absorb rows (S, D) and keep the best projections; with the kept indices if asked.

    Without a filter everything stays until `calib_tokens` rows are there; then it is the opposite
    of the direction of that many keys, as queries mostly lie against keys.
    """
    keys, values = (
        new if old is None else mx.concatenate([old, new])
        for old, new in ((state.keys, new_keys), (state.values, new_values))
    )
    if state.filter_dir is None and keys.shape[0] >= state.calib_tokens:
        state.filter_dir = -estimate_filter_dir(keys[: state.calib_tokens])
    index = mx.arange(keys.shape[0], dtype=mx.int32)
    if state.filter_dir is None:
        state.keys, state.values = keys, values
    else:
        out = qfilters_update_batched(
            keys[None], values[None], state.filter_dir[None], state.budget, state.n_sink,
            state.recent, state.sign, return_indices=True,
        )  # fmt: skip
        state.keys, state.values, state.scores, index = (a[0] for a in out)
    return (state, index) if return_indices else state


def qfilters_update_batched(
    keys_cat: mx.array,
    values_cat: mx.array,
    filter_dir: mx.array,
    budget: int,
    n_sink: int,
    recent: int,
    sign: int,
    *,
    return_indices: bool = False,
) -> tuple[mx.array, ...]:
    """Best `budget` of (BH, n, D) rows by filters (BH, D): keys, values, scores, indices if asked.

    `recent` newest rows are no candidates, at least one.
    """
    held = HeadRows(keys_cat, values_cat)
    scores = QueryDirection(sign, 1, filter_dir.astype(mx.float32)[None]).score(held)
    rule = Policy(min(budget, held.rows), n_sink, max(1, recent))
    sinks = min(rule.n_sink, rule.budget)
    newest = min(rule.n_recent, rule.budget - sinks)
    keep = select_rows(scores, rule.budget, sinks, newest)
    held.pick(keep)
    out = (*held.pair(), held.column("score"))
    return (*out, keep[0]) if return_indices else out


qfilters_get_kv = get_kv
qfilters_fp16_bytes = held_bytes
full_qfilters_fp16_bytes = full_bytes
