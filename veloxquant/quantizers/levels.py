"""Tables of unequally spaced levels: fitting, coding and looking up, for many tables at once.

Source: KVQuant (arXiv 2401.18079), section 3.4, without its weights: Lloyd's algorithm from levels
of equal mass.
"""

from functools import lru_cache

import mlx.core as mx
import numpy as np

from veloxquant.dsa.mlx_pack import unpack


def lloyd_levels(x: mx.array, bits: int, sweeps: int) -> mx.array:
    """Levels of least squared error for each row of (..., N) fp32.

    Args:
        x: samples.
        bits: log2 of the number of levels.
        sweeps: Lloyd sweeps after the start at quantiles of equal mass; an empty cell stays.

    Returns:
        (..., 2^bits) fp32, ascending.
    """
    count, n = 1 << bits, x.shape[-1]
    rows = mx.sort(x, axis=-1)
    place = (mx.arange(count) + 0.5) * ((n - 1) / count)
    low = mx.floor(place).astype(mx.int32)
    high = mx.minimum(low + 1, n - 1)
    below = mx.take(rows, low, axis=-1)
    levels = below + (mx.take(rows, high, axis=-1) - below) * (place - low)
    if not sweeps:
        return levels
    zero = mx.zeros((*x.shape[:-1], 1))
    sums = mx.concatenate([zero, mx.cumsum(rows, axis=-1)], axis=-1)
    ends = mx.full(zero.shape, n, dtype=mx.int32)
    for _ in range(sweeps):
        cuts = (levels[..., :-1] + levels[..., 1:]) / 2
        inner = [
            (rows <= cuts[..., i : i + 1]).sum(axis=-1, keepdims=True) for i in range(count - 1)
        ]
        edges = mx.concatenate([zero.astype(mx.int32), *inner, ends], axis=-1).astype(mx.int32)
        reached = mx.take_along_axis(sums, edges, axis=-1)
        size = edges[..., 1:] - edges[..., :-1]
        mean = (reached[..., 1:] - reached[..., :-1]) / mx.maximum(size, 1)
        # Sums of many values round; a mean never leaves its neighbours' cell by more than that.
        levels = mx.sort(mx.where(size > 0, mean, levels), axis=-1)
    return levels


def nearest(t: mx.array, levels: mx.array) -> mx.array:
    """Numbers of the levels (..., 1, L) that are nearest to `t` (..., N, D), uint8."""
    cuts = (levels[..., :-1] + levels[..., 1:]) / 2
    codes = mx.zeros(t.shape, dtype=mx.uint8)
    for i in range(cuts.shape[-1]):
        codes = codes + (t > cuts[..., i : i + 1])
    return codes


def looked_up(codes: mx.array, levels: mx.array) -> mx.array:
    """Levels (..., 1, L) at codes (..., N, D)."""
    return mx.take_along_axis(levels, codes.astype(mx.uint32), axis=-1)


def codes_of(words: mx.array, bits: int, n: int) -> mx.array:
    """Words (..., n·bits/32) in MLX's order to codes (..., n) uint32.

    Three bits go by fields of twelve, several times faster than by single codes.
    """
    if bits != 3:
        return unpack(words, bits, n)
    *lead, width = words.shape
    threes = words.reshape(*lead, width // 3, 3)
    a, b, c = (threes[..., i] for i in range(3))
    fields = mx.stack(
        [
            a, a >> 12, (a >> 24) | (b << 8), b >> 4,
            b >> 16, (b >> 28) | (c << 4), c >> 8, c >> 20,
        ],
        axis=-1,
    )  # fmt: skip
    codes = (fields[..., None] >> (mx.arange(4, dtype=mx.uint32) * 3)) & mx.array(7, mx.uint32)
    return codes.reshape(*lead, -1)[..., :n]


@lru_cache(maxsize=8)
def _all_runs(bits: int, run: int) -> mx.array:
    """Codes of every run of `run` neighbours, the first in the lowest bits: (2^(bits·run), run)."""
    every = np.arange(1 << (bits * run), dtype=np.uint32)[:, None]
    codes = (every >> (bits * np.arange(run, dtype=np.uint32))) & ((1 << bits) - 1)
    return mx.array(codes)


def book_of(levels: mx.array, bits: int) -> mx.array:
    """Levels (B, H, 1, 2^bits) of every run of neighbouring codes: (B, H, 1, codes, run).

    A run is four codes, two of four bits, so that the book stays in cache.
    """
    batch, heads = levels.shape[:2]
    codes = _all_runs(bits, 4 if bits < 4 else 2)
    book = mx.take_along_axis(levels.reshape(batch, heads, -1), codes.reshape(1, 1, -1), axis=-1)
    return book.reshape(batch, heads, 1, *codes.shape)
