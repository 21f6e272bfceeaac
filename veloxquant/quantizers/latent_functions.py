"""What the documented functions of svdq, palu and xkv share: bases of rows, grids along tokens.

They work on plain arrays and keep nothing; the caches use `quantizers.latent` instead.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from veloxquant.quantizers.specs.latent import even_bounds

_LEAST = 1e-12


def basis_of(x: mx.array, rank: int | None, energy: float) -> tuple[mx.array, mx.array, mx.array]:
    """Directions (D, r) fp32, mean (D,) and singular values (r,) of centred rows (S, D).

    Args:
        x: rows; at least one.
        rank: directions, at most min(S, D); None for as many as hold the share `energy`.
        energy: share of the squared singular values, in (0, 1].
    """
    rows = np.array(x.astype(mx.float32), dtype=np.float64)
    mean = rows.mean(axis=0)
    _, s, vt = np.linalg.svd(rows - mean, full_matrices=False)
    if rank is None:
        total = np.cumsum(s**2)
        rank = int(np.searchsorted(total, energy * total[-1] * (1 - _LEAST))) + 1
    rank = max(1, min(rank, len(s)))
    return (
        mx.array(np.ascontiguousarray(vt[:rank].T).astype(np.float32)),
        mx.array(mean.astype(np.float32)),
        mx.array(s[:rank].astype(np.float32)),
    )


def project_rows(x: mx.array, basis: mx.array, mean: mx.array) -> mx.array:
    """Latents (..., S, r) fp32 of rows (..., S, D)."""
    return (x.astype(mx.float32) - mean[..., None, :]) @ basis


def rows_of(
    latents: mx.array, basis: mx.array, mean: mx.array, dtype: mx.Dtype = mx.float16
) -> mx.array:
    """Rows (..., S, D) of latents (..., S, r)."""
    rows = latents.astype(mx.float32) @ basis.swapaxes(-1, -2) + mean[..., None, :]
    return rows.astype(dtype)


def on_grid(x: mx.array, bits: int, group: int) -> mx.array:
    """Values of the last axis rounded to 2^bits levels of their group, fp32; groups may be short.

    One bit has the mean less and plus the mean deviation as its levels; sixteen bits change
    nothing.
    """
    if bits >= 16:
        return x
    n = x.shape[-1]
    missing = -n % group
    if missing:
        x = mx.concatenate([x, mx.repeat(x[..., -1:], missing, axis=-1)], axis=-1)
    groups = x.astype(mx.float32).reshape(*x.shape[:-1], -1, group)
    if bits == 1:
        mean = groups.mean(axis=-1, keepdims=True)
        spread = mx.abs(groups - mean).mean(axis=-1, keepdims=True)
        out = mean + mx.where(groups >= mean, spread, -spread)
    else:
        low = groups.min(axis=-1, keepdims=True)
        step = (groups.max(axis=-1, keepdims=True) - low) / ((1 << bits) - 1)
        safe = mx.where(step > 0, step, 1.0)
        out = low + mx.round((groups - low) / safe) * step
    return out.reshape(*x.shape[:-1], -1)[..., :n]


def by_schedule(latents: mx.array, schedule: Sequence[int], group: int) -> mx.array:
    """Latents (..., S, r), strongest first, at the bits of their part, fp32; no bits drop a part.

    Scales run along `group` tokens of a latent.
    """
    parts = []
    bounds = even_bounds(latents.shape[-1], len(schedule))
    for bits, (start, stop) in zip(schedule, bounds, strict=False):
        part = latents[..., start:stop].astype(mx.float32)
        if bits:
            part = on_grid(part.swapaxes(-1, -2), bits, group).swapaxes(-1, -2)
        parts.append(part if bits else mx.zeros_like(part))
    return mx.concatenate(parts, axis=-1)
