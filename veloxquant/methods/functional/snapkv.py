"""snapkv on the keys and values of one head; the last keys stand for the queries."""

from typing import NamedTuple

import mlx.core as mx

from veloxquant.cache.attention_rows import attention_rows
from veloxquant.cache.selection import select_rows
from veloxquant.methods.functional.rows import HALF_BYTES, full_bytes


class SnapKVState(NamedTuple):
    """Rows (n_kept, D) that stayed of `n_original`, and which ones."""

    kept_keys: mx.array
    kept_values: mx.array
    kept_indices: mx.array
    n_original: int
    n_kept: int


def obs_window_attention_scores(keys: mx.array, obs_window: int) -> mx.array:
    """Mean attention of the last `obs_window` keys over all keys (S, D): (S,) fp32."""
    n = keys.shape[0]
    window = max(1, min(obs_window, n))
    rows = keys[None, None]
    weights = attention_rows(rows[:, :, n - window :], rows, keys.shape[-1] ** -0.5, n - window)
    return weights[0, 0, 0].mean(axis=0)


def snap_select_indices(
    scores: mx.array, budget: int, n_sink: int, *, backend: str = "auto"
) -> mx.array:
    """The best `budget` of (S,) scores, first rows in any case, ascending int32.

    NaN counts as worst, the earlier of equal scores stays. `backend` has no effect.
    """
    del backend
    budget = min(budget, scores.shape[0])
    return select_rows(scores[None, None], budget, min(n_sink, budget), 0)[0, 0]


def snapkv_compress(
    keys: mx.array,
    values: mx.array,
    budget: int,
    obs_window: int = 32,
    n_sink: int = 4,
    *,
    backend: str = "auto",
    output_dtype: mx.Dtype = mx.float16,
) -> SnapKVState:
    """Keep `budget` rows of (S, D) keys and values: sinks, the window, the best of the others."""
    n = keys.shape[0]
    window = min(obs_window, n)
    scores = obs_window_attention_scores(keys, window)
    # The window's own rows stay, as the observers they are.
    scores = mx.where(mx.arange(n) >= n - window, mx.inf, scores)
    index = snap_select_indices(scores, budget, n_sink, backend=backend)
    return SnapKVState(
        mx.take(keys, index, axis=0).astype(output_dtype),
        mx.take(values, index, axis=0).astype(output_dtype),
        index, n, index.shape[0],
    )  # fmt: skip


def snapkv_fp16_bytes(state: SnapKVState) -> int:
    """Bytes of the rows held in 16 bits."""
    return HALF_BYTES * (state.kept_keys.size + state.kept_values.size)


def full_fp16_bytes(n: int, d: int) -> int:
    """Bytes of all rows in 16 bits."""
    return full_bytes(n, d)
