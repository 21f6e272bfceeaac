"""Directions merged over two layers, as documented functions on plain arrays.

Source: MiniCache (arXiv 2405.14366).
"""

from math import ceil
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from veloxquant.quantizers.merged import length_and_direction, slerp_directions


class MergeResult(NamedTuple):
    """Shared directions (S, D), lengths (S, 1) of both layers, and the rows kept apart.

    `retained` says which tokens those are; `full_primary` and `full_merge` hold their rows.
    """

    shared_dir: mx.array
    mag_primary: mx.array
    mag_merge: mx.array
    retained: mx.array
    full_primary: mx.array
    full_merge: mx.array


def pair_layers_depth(
    n_layers: int, start_frac: float = 0.5, group_size: int = 2
) -> list[tuple[str, int]]:
    """Part and group of every layer: alone below the start, then in groups of `group_size`."""
    start = ceil(start_frac * n_layers)
    alone = [("primary", i) for i in range(start)]
    return alone + [
        ("merge" if i % group_size else "primary", start + i // group_size)
        for i in range(n_layers - start)
    ]


def to_mag_dir(x: mx.array) -> tuple[mx.array, mx.array]:
    """Length (..., 1) and unit direction (..., D) of vectors; zero has direction zero."""
    return length_and_direction(x)


def slerp(d0: mx.array, d1: mx.array, t: float = 0.5) -> mx.array:
    """The unit direction at share `t` of the arc between two, (..., D)."""
    return slerp_directions(d0.astype(mx.float32), d1.astype(mx.float32), t)


def merge_pair(
    x_primary: mx.array, x_merge: mx.array, retention_threshold: float = 0.9, t: float = 0.5
) -> MergeResult:
    """Merge rows (..., D) of two layers; tokens of a cosine below the threshold are kept apart.

    A threshold of 1 keeps all of them.
    """
    x, y = (a.reshape(-1, a.shape[-1]) for a in (x_primary, x_merge))
    (long_x, unit_x), (long_y, unit_y) = length_and_direction(x), length_and_direction(y)
    cosine = (unit_x * unit_y).sum(axis=-1)
    retained = (cosine < retention_threshold) | (retention_threshold >= 1)
    index = mx.array(np.flatnonzero(np.array(retained)).astype(np.int32))
    return MergeResult(
        slerp_directions(unit_x, unit_y, t), long_x, long_y, retained,
        mx.take(x, index, axis=0), mx.take(y, index, axis=0),
    )  # fmt: skip


def reconstruct_layer(res: MergeResult, which: str) -> mx.array:
    """Rows (S, D) fp16 of one layer: "primary" or "merge".

    Raises:
        ValueError: for another name.
    """
    if which not in ("primary", "merge"):
        raise ValueError(f"which={which!r}; give 'primary' or 'merge'")
    first = which == "primary"
    rows = res.shared_dir * (res.mag_primary if first else res.mag_merge)
    kept = res.full_primary if first else res.full_merge
    if not kept.shape[0]:
        return rows.astype(mx.float16)
    place = mx.maximum(mx.cumsum(res.retained.astype(mx.int32)) - 1, 0)
    own = mx.take(kept.astype(mx.float32), place, axis=0)
    return mx.where(res.retained[:, None], own, rows).astype(mx.float16)


def merge_similarity(a: mx.array, b: mx.array) -> dict[str, float]:
    """`cosine` of directions and `magnitude_ratio` of lengths of rows (..., D), on average."""
    (long_a, unit_a), (long_b, unit_b) = length_and_direction(a), length_and_direction(b)
    ratio = mx.minimum(long_a, long_b) / mx.maximum(mx.maximum(long_a, long_b), 1e-30)
    return {
        "cosine": _number((unit_a * unit_b).sum(axis=-1).mean()),
        "magnitude_ratio": _number(ratio.mean()),
    }


def _number(a: mx.array) -> float:
    value: Any = a.item()
    return float(value)
