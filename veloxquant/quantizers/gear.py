"""Backbone, low-rank factors and outliers as functions on plain matrices, for analysis.

Here the outliers are the largest entries of what backbone and factors leave. Caches use
`corrected.py`, which sets outliers aside first and keeps as many for every token.
Source: GEAR (arXiv 2403.05527).
"""

import math
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np

from veloxquant.quantizers.cachegen import (
    CodeStream,
    fixed_width_bytes,
    quantize_to_codes,
    widened,
)

Axis = Literal["token", "channel"]
OUTLIER_BYTES = 6
"""int32 place and fp16 value."""


class GEARState(NamedTuple):
    """One matrix (n_rows, D): codes and grids of the backbone, factors, outliers.

    `axis` "channel": groups of rows, codes (groups, g, D); "token": groups of channels, on the
    transposed matrix of `d_cols` columns. Factors and outliers are None where there are none.
    """

    codes: mx.array
    scale: mx.array
    zero: mx.array
    L: mx.array | None
    R: mx.array | None
    sp_idx: mx.array | None
    sp_val: mx.array | None
    n_rows: int
    bits: int
    rank: int
    axis: str = "token"
    d_cols: int = 0


def quantize_base(
    x: mx.array, bits: int, group_size: int = 32, axis: str = "token"
) -> tuple[CodeStream, mx.array]:
    """Codes of (N, D) and the rows they stand for, fp32.

    Args:
        x: rows.
        bits: 1 to 8.
        group_size: entries that share a grid.
        axis: "channel" groups tokens of a channel (keys), "token" channels of a token (values).

    Raises:
        ValueError: for another axis.
    """
    if axis not in ("token", "channel"):
        raise ValueError(f"axis={axis!r} must be 'token' or 'channel'")
    turned = axis == "token"
    stream = quantize_to_codes(x.T if turned else x, bits, group_size)
    rows = widened(stream)
    return stream, rows.T if turned else rows


def residual(x: mx.array, base_recon: mx.array) -> mx.array:
    """What the backbone misses, (N, D) fp32."""
    return x.astype(mx.float32) - base_recon.astype(mx.float32)


def lowrank_error(
    E: mx.array, rank: int | None, energy_threshold: float = 0.9
) -> tuple[mx.array | None, mx.array | None]:
    """Best factors L (N, r) and R (r, D) of an error matrix; (None, None) at rank 0.

    Args:
        E: (N, D).
        rank: columns of L; None for as many as hold a share of the energy.
        energy_threshold: that share.
    """
    if rank == 0 or 0 in E.shape:
        return None, None
    u, s, vt = np.linalg.svd(np.array(E.astype(mx.float32)), full_matrices=False)
    if rank is None:
        energy = np.cumsum(np.square(s, dtype=np.float64))
        if energy[-1] == 0:
            return None, None
        rank = int(np.searchsorted(energy, energy_threshold * energy[-1])) + 1
    rank = min(rank, len(s))
    return mx.array(u[:, :rank] * s[:rank]), mx.array(np.ascontiguousarray(vt[:rank]))


def sparse_outliers_batched(
    resid: mx.array, frac: float
) -> tuple[mx.array | None, mx.array | None]:
    """The largest entries of each (N, D): places in the flat matrix int32, values fp16, (..., nnz).

    Args:
        resid: (..., N, D).
        frac: share of the entries, rounded up; 0 gives (None, None).
    """
    flat = resid.reshape(*resid.shape[:-2], -1).astype(mx.float32)
    count = math.ceil(frac * flat.shape[-1])
    if count == 0:
        return None, None
    count = min(count, flat.shape[-1])
    place = mx.argsort(-mx.abs(flat), axis=-1)[..., :count]
    return place.astype(mx.int32), mx.take_along_axis(flat, place, axis=-1).astype(mx.float16)


def sparse_outliers(resid: mx.array, frac: float) -> tuple[mx.array | None, mx.array | None]:
    """As `sparse_outliers_batched` for one matrix (N, D)."""
    return sparse_outliers_batched(resid, frac)


def gear_compress(
    x: mx.array,
    bits: int = 2,
    rank: int | None = None,
    sparse_frac: float = 0.01,
    group_size: int = 32,
    energy_threshold: float = 0.9,
    base_axis: str = "token",
) -> GEARState:
    """Code (N, D): backbone, then factors of its error, then the outliers of what is left.

    A rank chosen by energy is at most a 32nd of the smaller side, since rounding errors are nearly
    white and a large share of their energy takes as much room as the rows; factors as large as the
    rows are left out.
    """
    n, d = x.shape
    stream, base = quantize_base(x, bits, group_size, base_axis)
    error = residual(x, base)
    if rank is None:
        cap = max(1, min(n, d) // 32)
        wanted, _ = lowrank_error(error, None, energy_threshold)
        rank = 0 if wanted is None else min(cap, wanted.shape[1])
        rank = rank if rank * (n + d) < n * d else 0
    left, right = lowrank_error(error, rank)
    if left is not None and right is not None:
        left, right = left.astype(mx.float16), right.astype(mx.float16)
        error = error - left.astype(mx.float32) @ right.astype(mx.float32)
    place, value = sparse_outliers(error, sparse_frac)
    return GEARState(
        stream.codes, stream.scale, stream.zero, left, right, place, value, n, bits,
        0 if left is None else left.shape[1], base_axis, d,
    )  # fmt: skip


def _base_stream(state: GEARState) -> CodeStream:
    rows = state.d_cols if state.axis == "token" else state.n_rows
    return CodeStream(state.codes, state.scale, state.zero, rows, state.bits)


def gear_reconstruct(state: GEARState, base: mx.array | None = None) -> mx.array:
    """Rows (n_rows, D) fp16; `base` saves unpacking the backbone."""
    if base is None:
        rows = widened(_base_stream(state))
        base = rows.T if state.axis == "token" else rows
    left, right, place, value = (
        part if part is None else part[None]
        for part in (state.L, state.R, state.sp_idx, state.sp_val)
    )
    return gear_reconstruct_batched(base[None], left, right, place, value)[0]


def gear_reconstruct_batched(
    base: mx.array,
    L: mx.array | None,
    R: mx.array | None,
    sp_idx: mx.array | None,
    sp_val: mx.array | None,
    out_dtype: mx.Dtype = mx.float16,
) -> mx.array:
    """Backbone (BH, N, D) plus factors (BH, N, r), (BH, r, D) plus outliers (BH, nnz)."""
    rows = base.astype(mx.float32)
    if L is not None and R is not None:
        rows = rows + L.astype(mx.float32) @ R.astype(mx.float32)
    if sp_idx is not None and sp_val is not None:
        flat = rows.reshape(rows.shape[0], -1)
        place = sp_idx.astype(mx.uint32)
        there = mx.take_along_axis(flat, place, axis=-1) + sp_val.astype(mx.float32)
        rows = mx.put_along_axis(flat, place, there, axis=-1).reshape(rows.shape)
    return rows.astype(out_dtype)


def base_only_bytes(state: GEARState) -> int:
    """Bytes of packed codes with fp16 scales and minima."""
    return fixed_width_bytes(_base_stream(state))


def gear_bytes(state: GEARState) -> int:
    """Bytes of everything: backbone, fp16 factors, outliers."""
    factors = sum(2 * part.size for part in (state.L, state.R) if part is not None)
    outliers = 0 if state.sp_idx is None else OUTLIER_BYTES * state.sp_idx.size
    return base_only_bytes(state) + factors + outliers


def gear_quant_dequant(
    x: mx.array,
    bits: int = 2,
    rank: int | None = None,
    sparse_frac: float = 0.01,
    group_size: int = 32,
    energy_threshold: float = 0.9,
    base_axis: str = "token",
) -> mx.array:
    """Rows (N, D) as their code gives them back, fp16."""
    state = gear_compress(x, bits, rank, sparse_frac, group_size, energy_threshold, base_axis)
    return gear_reconstruct(state)
