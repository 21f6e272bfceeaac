"""What to expect of rows beyond a sample that has few different ones.

A prompt may begin with hundreds of equal tokens: blanks, padding, a repeated word. The covariance
of their rows spans a few directions at most, and a basis of these would leave nothing of what comes
in all the others. The size of the rows is all that is known then.
"""

from functools import lru_cache

import mlx.core as mx
import numpy as np

_ALIKE = 1e-5
"""Squared distance, as a share of the squared length, up to which rows count as equal: above what
rounding to 16 bits does."""
_LAGS, _TURNED = 3, 2e-3
"""Products with the row itself and the next two, and their difference as a share of the squared
length up to which they count as equal."""
_NEIGHBOURS = 4
"""Shorter rows with which one is compared: rounding mixes rows of nearly one length."""
_PAIRINGS = (-2, -1)
"""Halves of a row, or neighbours: the two ways of position encoding."""
_TINY = 1e-30
_PEAKED = 1.5
"""Mean square of a Gaussian over its squared mean magnitude: the latter heeds outliers less."""


def different_rows(x: mx.array) -> np.ndarray:
    """How many of the rows (B, H, n, D) are different, (B, H).

    Position encoding makes different rows of equal ones, and leaves their products with the next
    ones as they are: rows count as alike where these are.
    """
    x = x.astype(mx.float32)
    rows = x / mx.maximum(mx.abs(x).max(axis=(-1, -2), keepdims=True), _TINY)
    square = mx.square(rows).mean(axis=-2, keepdims=True)
    found = [_unlike(rows, _paired(square, axis)) for axis in _PAIRINGS]
    return np.minimum(*found)


def _paired(square: mx.array, axis: int) -> mx.array:
    """Mean squares (..., D) of channels with their partners, which lie side by side along `axis`.

    Pairs that turn together need one scale, and channels as loud as a hundred others none of
    theirs.
    """
    dim = square.shape[-1]
    if dim % 2:
        return square
    shape = (2, dim // 2) if axis == -2 else (dim // 2, 2)
    pairs = square.reshape(*square.shape[:-1], *shape)
    return mx.broadcast_to(pairs.mean(axis=axis, keepdims=True), pairs.shape).reshape(square.shape)


def _unlike(x: mx.array, square: mx.array) -> np.ndarray:
    """How many of (B, H, n, D), divided by the roots of `square`, are unlike the next shorter ones.

    Equal rows are nearly equally long, so they lie side by side.
    """
    rows = x * mx.where(square > 0, mx.rsqrt(mx.maximum(square, _TINY)), 0.0)
    length = mx.square(rows).sum(axis=-1)
    places = rows @ _directions(x.shape[-1])
    # The last rows have no next ones; they count as unlike.
    nexts = [
        mx.pad((rows[:, :, lag:] * rows[:, :, : x.shape[2] - lag]).sum(axis=-1),
               [(0, 0), (0, 0), (0, lag)], constant_values=mx.nan)
        for lag in range(1, _LAGS)
    ]  # fmt: skip
    size = np.array(length)
    order = np.argsort(size, axis=-1, kind="stable")
    size = np.take_along_axis(size, order, axis=-1)
    signs = [
        np.take_along_axis(np.array(a), order[..., None], axis=-2)
        for a in (places, mx.stack([length, *nexts], axis=-1))
    ]
    known = np.zeros(size.shape, dtype=bool)
    for step in range(1, _NEIGHBOURS + 1):
        most = size[..., step:, None]
        place, turned = (np.abs(a[..., step:, :] - a[..., :-step, :]) for a in signs)
        alike = (place <= np.sqrt(_ALIKE * most)).all(axis=-1)
        known[..., step:] |= alike | (turned <= _TURNED * most).all(axis=-1)
    return (~known).sum(axis=-1)


@lru_cache(maxsize=8)
def _directions(dim: int) -> mx.array:
    """A few fixed directions (D, 4) that tell rows apart, of length 1."""
    draws = np.random.default_rng(dim).standard_normal((dim, _LAGS + 1))
    out = mx.array((draws / np.linalg.norm(draws, axis=0)).astype(np.float32))
    mx.eval(out)
    return out


def unseen_share(different: np.ndarray, rows: int, dim: int) -> np.ndarray:
    """How much of the directions a sample of `rows` leaves open: 1 for one row, 0 for `dim`.

    Half of the rows are enough in any case: text repeats words.
    """
    enough = min(dim, rows // 2)
    return np.clip(1 - (different - 1) / enough, 0.0, 1.0)


def common_square(square: np.ndarray) -> np.ndarray:
    """Mean square (..., 1) of a channel of rows unlike the sample, from its mean squares (..., D).

    One where all rows are zeros.
    """
    common = _PEAKED * np.square(np.sqrt(square).mean(axis=-1, keepdims=True))
    return np.where(common > 0, common, 1.0)


def with_unlike_rows(x: mx.array) -> mx.array:
    """Rows (B, H, n, D) fp32; of heads with few different ones some are drawn at random instead.

    Three of four, of as large a share as the sample leaves open, about as long as the known
    ones. Heads with enough different rows stay as they are, and those whose rows are one and the
    same, which is to be coded as it is.
    """
    share = unseen_share(different_rows(x), *x.shape[2:])
    if not share.any():
        return x
    rows = np.array(x, dtype=np.float32)
    share = share * (rows != rows[:, :, :1]).any(axis=(-1, -2))
    square = np.square(rows, dtype=np.float64).mean(axis=2)
    spread = np.sqrt(np.maximum(square, common_square(square)))[..., None, :]
    drawn = spread * np.random.default_rng(0).standard_normal(rows.shape[2:])
    place = np.arange(rows.shape[2])
    taken = (place % 4 > 0) & (place < share[..., None] * rows.shape[2])
    return mx.array(np.where(taken[..., None], drawn, rows).astype(np.float32))
