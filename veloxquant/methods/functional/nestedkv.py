"""nestedkv on rows of single heads, each with its own budget."""

from dataclasses import dataclass

import mlx.core as mx

from veloxquant.cache.selection import select_rows
from veloxquant.methods.functional.rows import (
    HeadRows,
    HeadState,
    full_bytes,
    get_kv,
    held_bytes,
    lift,
)
from veloxquant.quantizers.nestedkv import nestedkv_score


@dataclass
class NestedKVState(HeadState):
    """Rows of one head; `compressed` once a prompt was."""

    compressed: bool = False


def init_nestedkv_state(n_sink: int) -> NestedKVState:
    """An empty state."""
    return NestedKVState(n_sink=n_sink)


def nestedkv_compress_prefill(
    state: NestedKVState,
    keys: mx.array,
    values: mx.array,
    budget: int,
    window: int = 64,
    beta: float = 3.0,
    tau: float = 0.6,
    kappa: float = 10.0,
) -> NestedKVState:
    """Hold the best min(budget, S) rows of a prompt (S, D), sinks among them, in their order."""
    out = nestedkv_compress_prefill_batched(
        keys[None], values[None], state.n_sink, budget, window, beta, tau, kappa
    )
    state.keys, state.values, state.compressed = out[0][0], out[1][0], True
    return state


def nestedkv_compress_prefill_batched(
    keys: mx.array,
    values: mx.array,
    n_sink: int,
    budget: int,
    window: int = 64,
    beta: float = 3.0,
    tau: float = 0.6,
    kappa: float = 10.0,
    *,
    return_indices: bool = False,
) -> tuple[mx.array, ...]:
    """As `nestedkv_compress_prefill` for (BH, S, D); with indices (BH, m) int32 if asked for."""
    scores = nestedkv_score(keys, window, beta, tau, kappa)
    keep = select_rows(scores[None], min(budget, keys.shape[1]), min(n_sink, budget), 0)
    held = HeadRows(keys, values)
    held.pick(keep)
    return (*held.pair(), keep[0]) if return_indices else held.pair()


def nestedkv_append_decode(state: NestedKVState, keys: mx.array, values: mx.array) -> NestedKVState:
    """Add rows (S, D); nothing goes."""
    old_keys, old_values = lift(state.keys, state.values)
    out = nestedkv_append_decode_batched(old_keys, old_values, keys[None], values[None])
    state.keys, state.values = out[0][0], out[1][0]
    return state


def nestedkv_append_decode_batched(
    prev_keys: mx.array | None,
    prev_values: mx.array | None,
    keys: mx.array,
    values: mx.array,
) -> tuple[mx.array, mx.array]:
    """As `nestedkv_append_decode` for (BH, n, D)."""
    if prev_keys is None or prev_values is None:
        return keys, values
    pairs = ((prev_keys, keys), (prev_values, values))
    joined = [mx.concatenate(list(pair), axis=1) for pair in pairs]
    return joined[0], joined[1]


nestedkv_get_kv = get_kv
nestedkv_fp16_bytes = held_bytes
full_nestedkv_fp16_bytes = full_bytes
