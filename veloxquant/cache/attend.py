"""Attention over a list of stores: score pieces, one softmax, sum of value products.

Few query rows read packed history directly; many rows decode it tile by tile into an online
softmax, because packed products cost in proportion to the rows. Keys and values may be split into
stores at different tokens.
"""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from veloxquant.cache.native_step import attend_native
from veloxquant.cache.plans import SCORE_BYTES, TILE_TOKENS
from veloxquant.kernels import dispatch
from veloxquant.kernels.native import PLAIN, NativeRun
from veloxquant.quantizers.base import NativeParts, compute_dtype, saturated

PACKED_ROWS = 16
"""Query rows of one KV head up to which packed products beat decoding a tile (measured on CPU)."""


class Run(Protocol):
    """Tokens that attention can read: a store, or fresh rows."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        ...

    def scores(self, q: mx.array) -> mx.array:
        """(B, H, M, D) to (B, H, M, length)."""
        ...

    def mix(self, w: mx.array) -> mx.array:
        """(B, H, M, length) to (B, H, M, D)."""
        ...

    def decode(self, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, stop - start, D)."""
        ...

    def native(self) -> NativeParts | None:
        """The tokens for the compiled kernel; None if it lacks the form."""
        ...


class Fresh:
    """Rows of the current call, at full precision."""

    def __init__(self, x: mx.array) -> None:
        self.x = x
        self.length = x.shape[2]

    def scores(self, q: mx.array) -> mx.array:
        """q·Kᵀ."""
        return q @ self.x.astype(q.dtype).swapaxes(-1, -2)

    def mix(self, w: mx.array) -> mx.array:
        """w·V."""
        return w @ self.x.astype(w.dtype)

    def native(self) -> NativeRun:
        """The rows for the compiled kernel."""
        return NativeRun(PLAIN, self.x, 0, self.length, self.x.shape[-1])

    def decode(self, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
        """The rows themselves."""
        return self.x[:, :, start:stop].astype(dtype)


Mask = mx.array | str | None


def attend(
    queries: mx.array,
    keys: Sequence[Run],
    values: Sequence[Run],
    *,
    n_kv: int,
    v_dim: int,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
    use_kernels: bool | None = None,
) -> mx.array:
    """Softmax attention over packed and exact tokens.

    Args:
        queries: (B, Hq, L, D); query head h reads KV head h // (Hq / H).
        keys: runs in token order.
        values: runs in token order with the same number of tokens in all.
        n_kv: number of KV heads H.
        v_dim: head size of the values.
        scale: factor on the scores.
        mask: None, "causal" (aligned to the newest token), or an array, bool or additive, that
            broadcasts to (B, Hq, L, T).
        sinks: (Hq,) logits that join the denominator only.
        use_kernels: False keeps to array operations, None decides by device and shape.

    Returns:
        (B, Hq, L, Dv) in the queries' type.

    Raises:
        ValueError: when an array mask covers another number of tokens than are held, or the mask is
            a string other than "causal".
    """
    total = sum(k.length for k in keys)
    batch, n_q, length, dim = queries.shape
    repeat = n_q // n_kv
    if isinstance(mask, str) and mask != "causal":
        raise ValueError(f"unknown mask {mask!r}; pass None, 'causal' or an array")
    work = compute_dtype(queries.dtype)
    if isinstance(mask, mx.array) and mask.shape[-1] != total:
        raise ValueError(f"the mask covers {mask.shape[-1]} tokens, the cache holds {total}")
    rows, widest = repeat * length, max(dim, v_dim)
    if dispatch.route(rows=rows, dim=widest, mask=mask, use_kernels=use_kernels) == "native":
        done = attend_native(
            queries, keys, values, n_kv=n_kv, v_dim=v_dim, scale=scale, mask=mask, sinks=sinks
        )
        if done is not None:
            return saturated(done, queries.dtype)
    q = (queries.astype(work) * scale).reshape(batch, n_kv, rows, dim)
    if sinks is not None:
        sinks = mx.broadcast_to(
            sinks.astype(mx.float32).reshape(1, n_kv, repeat, 1), (batch, n_kv, repeat, length)
        ).reshape(batch, n_kv, rows, 1)
    with dispatch.arrays_only(use_kernels is False):
        if rows <= PACKED_ROWS:
            bias = _Bias(mask, n_kv, repeat, length, total)
            out = _attend_packed(q, keys, values, bias, sinks)
        else:
            out = _attend_chunks(q, keys, values, mask, n_kv, repeat, length, total, sinks)
    return saturated(out.reshape(batch, n_q, length, -1), queries.dtype)


class _Bias:
    """The mask in the folded layout (B, H, R·L, T), cut to a range of queries and tokens."""

    def __init__(self, mask: Mask, n_kv: int, repeat: int, length: int, total: int) -> None:
        self.mask, self.n_kv, self.repeat, self.length, self.total = (
            mask, n_kv, repeat, length, total,
        )  # fmt: skip
        self.rows = (0, length)

    def narrowed(self, start: int, stop: int) -> "_Bias":
        """The same mask for queries [start, stop)."""
        out = _Bias(self.mask, self.n_kv, self.repeat, self.length, self.total)
        out.rows = (start, stop)
        return out

    def hides(self, start: int) -> bool:
        """Whether tokens from `start` on are all in the future of every query."""
        return isinstance(self.mask, str) and start > self.total - self.length + self.rows[1] - 1

    def apply(self, scores: mx.array, start: int, stop: int) -> mx.array:
        """Mask scores (B, H, R·L, stop - start) of tokens [start, stop)."""
        if self.mask is None:
            return scores
        low, high = self.rows
        if isinstance(self.mask, str):
            first = self.total - self.length
            if stop <= first + low + 1:
                return scores
            q = mx.arange(first + low, first + high)[:, None]
            visible = q >= mx.arange(start, stop)[None]
        else:
            visible = self.mask[..., start:stop]
            if visible.shape[-2] > 1:
                visible = visible[..., low:high, :]
        batch, _, rows, width = scores.shape
        wide = scores.reshape(batch, self.n_kv, self.repeat, high - low, width)
        if visible.ndim == 4:
            b, h = visible.shape[:2]
            visible = visible.reshape(
                b, *((1, 1) if h == 1 else (self.n_kv, self.repeat)), *visible.shape[2:]
            )
        if visible.dtype == mx.bool_:
            wide = mx.where(visible, wide, mx.array(-mx.inf, dtype=wide.dtype))
        else:
            wide = wide + visible.astype(wide.dtype)
        return wide.reshape(batch, self.n_kv, rows, width)


def _attend_packed(
    q: mx.array,
    keys: Sequence[Run],
    values: Sequence[Run],
    bias: _Bias,
    sinks: mx.array | None,
) -> mx.array:
    """One softmax over the concatenated scores of all runs."""
    pieces = [run.scores(q) for run in keys]
    scores = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=-1)
    scores = bias.apply(scores, 0, bias.total).astype(mx.float32)
    if sinks is not None:
        scores = mx.concatenate([sinks, scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True).astype(q.dtype)
    if isinstance(bias.mask, mx.array):
        # A query that may see nothing at all (the padding of a prompt) gets zeros.
        weights = mx.where(scores.max(axis=-1, keepdims=True) == -mx.inf, 0.0, weights)
    if sinks is not None:
        weights = weights[..., 1:]
    out, start = None, 0
    for run in values:
        part = run.mix(weights[..., start : start + run.length])
        out = part if out is None else out + part
        start += run.length
    assert out is not None
    assert start == bias.total, "values and keys hold different tokens"
    return out


def decode_range(runs: Sequence[Run], start: int, stop: int, dtype: mx.Dtype) -> mx.array:
    """Tokens [start, stop) of a list of runs, unpacked: (B, H, stop - start, D)."""
    parts, base = [], 0
    for run in runs:
        low, high = max(start, base), min(stop, base + run.length)
        if low < high:
            parts.append(run.decode(low - base, high - base, dtype))
        base += run.length
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _attend_chunks(
    q: mx.array,
    keys: Sequence[Run],
    values: Sequence[Run],
    mask: Mask,
    n_kv: int,
    repeat: int,
    length: int,
    total: int,
    sinks: mx.array | None,
) -> mx.array:
    """Queries in chunks whose score blocks stay under `SCORE_BYTES`, history in decoded tiles."""
    batch, _, _, dim = q.shape
    tile = min(TILE_TOKENS, total)
    per_query = batch * n_kv * repeat * tile * 4
    chunk = max(1, min(length, SCORE_BYTES // per_query))
    bias = _Bias(mask, n_kv, repeat, length, total)
    wide = q.reshape(batch, n_kv, repeat, length, dim)
    outs = []
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        rows = wide[:, :, :, start:stop].reshape(batch, n_kv, repeat * (stop - start), dim)
        edge = None
        if sinks is not None:
            edge = sinks.reshape(batch, n_kv, repeat, length, 1)[:, :, :, start:stop]
            edge = edge.reshape(batch, n_kv, repeat * (stop - start), 1)
        part = _online_softmax(rows, keys, values, bias.narrowed(start, stop), edge)
        if stop < length:
            mx.eval(part)
        outs.append(part.reshape(batch, n_kv, repeat, stop - start, -1))
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=3)
    return out.reshape(batch, n_kv, repeat * length, -1)


def _online_softmax(
    q: mx.array,
    keys: Sequence[Run],
    values: Sequence[Run],
    bias: _Bias,
    sinks: mx.array | None,
) -> mx.array:
    """Running maximum, denominator and output over tiles of tokens, in float32."""
    peak = sinks if sinks is not None else mx.full((*q.shape[:3], 1), -mx.inf)
    norm = mx.ones_like(peak) if sinks is not None else mx.zeros_like(peak)
    out = mx.zeros((), dtype=mx.float32)
    for start in range(0, bias.total, TILE_TOKENS):
        if bias.hides(start):
            break
        stop = min(start + TILE_TOKENS, bias.total)
        scores = q @ decode_range(keys, start, stop, q.dtype).swapaxes(-1, -2)
        scores = bias.apply(scores.astype(mx.float32), start, stop)
        new_peak = mx.maximum(peak, scores.max(axis=-1, keepdims=True))
        safe = mx.where(new_peak == -mx.inf, 0.0, new_peak)
        weights = mx.exp(scores - safe)
        shrink = mx.exp(peak - safe)
        norm = norm * shrink + weights.sum(axis=-1, keepdims=True)
        rows = decode_range(values, start, stop, q.dtype)
        out = out * shrink + (weights.astype(q.dtype) @ rows).astype(mx.float32)
        peak = new_peak
        if stop < bias.total:
            # MLX runs ahead by many operations, each with its buffers; this keeps one tile alive.
            mx.eval(out, norm, peak)
    return out / mx.maximum(norm, 1e-30)
