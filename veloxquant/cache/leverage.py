"""Leverage of rows: how much each one is needed to span the others, as a score of tokens."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from veloxquant.cache.evicting import POSITIONS
from veloxquant.cache.scorers import Rows, Scorer
from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers.a2ats_rope import PositionCode

Sides = tuple[mx.array, mx.array]
LEAST_SHARE = 1e-6
"""Directions with less than this share of the largest one's energy are noise."""


def leverage_basis(x: mx.array, rank: int) -> mx.array:
    """Map (..., D, rank) whose products with the rows (..., n, D) have leverages as square sums.

    The leading `rank` right singular vectors over their singular values, by the D × D Gram matrix
    in fp32; directions without energy give zeros.
    """
    rows = x.astype(mx.float32)
    # Squares of long rows must neither overflow nor vanish.
    peak = mx.maximum(mx.abs(rows).max(axis=(-2, -1), keepdims=True), 1e-30)
    rows = rows / peak
    energy, vectors = mx.linalg.eigh(rows.swapaxes(-1, -2) @ rows, stream=mx.cpu)
    energy, vectors = energy[..., -rank:], vectors[..., -rank:]
    sound = energy > LEAST_SHARE * mx.maximum(energy[..., -1:], 1e-30)
    scale = mx.where(sound, mx.rsqrt(mx.where(sound, energy, 1.0)), 0.0)
    return vectors * scale[..., None, :] / peak


def leverage(x: mx.array, basis: mx.array) -> mx.array:
    """Leverage (..., n) fp32 of rows (..., n, D) under a basis (..., D, rank).

    Of the rows that made the basis each is in [0, 1] and they sum to the rank found.
    """
    return mx.square(x.astype(mx.float32) @ basis).sum(axis=-1)


class ValueLeverage(Scorer):
    """Leverage of a token's key, without its position, times that of its value.

    The bases are those of all rows at the first eviction after a prompt, and rate decoded tokens
    until the next prompt: column "leverage".
    Source: CurDKV (arXiv 2509.15038).

    Args:
        rank: directions that count.
        position: the layer's position encoding.
    """

    def __init__(self, rank: int, position: PositionCode) -> None:
        self.rank, self.position = rank, position
        self.bases: tuple[mx.array, mx.array] | None = None

    def append(self, rows: Rows, keys: mx.array) -> None:
        """A block of tokens asks for new bases; a single one is rated with those there are."""
        if keys.shape[2] > 1:
            self.bases = None
            rows.columns.pop("leverage", None)
        elif self.bases is not None:
            old = rows.columns["leverage"]
            new = self._rate(self._sides(rows, keys))
            rows.columns["leverage"] = mx.concatenate([old, new], axis=-1)

    def _sides(self, rows: Rows, keys: mx.array) -> Sides:
        """Keys without position, and values, of the newest rows, which have these keys."""
        start = rows.rows - keys.shape[2]
        held = rows.columns.get(POSITIONS)
        at = mx.arange(start, rows.rows) if held is None else held[..., start:]
        return self.position.turn(keys.astype(mx.float32), -at), rows.values()[:, :, start:]

    def _rate(self, sides: Sides) -> mx.array:
        assert self.bases is not None
        of_keys, of_values = (leverage(x, b) for x, b in zip(sides, self.bases, strict=True))
        return of_keys * of_values

    def score(self, rows: Rows) -> mx.array:
        """The column (B, H, n)."""
        if self.bases is None:
            keys, values = sides = self._sides(rows, rows.keys())
            self.bases = (leverage_basis(keys, self.rank), leverage_basis(values, self.rank))
            rows.columns["leverage"] = self._rate(sides)
        return rows.columns["leverage"]

    def rewind(self, n: int) -> None:
        """Before an eviction there are no bases yet."""
        del n

    def arrays(self) -> Iterator[mx.array]:
        """The bases."""
        yield from self.bases or ()

    def saved(self) -> list[Any]:
        """The bases."""
        return list(self.bases or (None, None))

    def restore(self, saved: list[Any]) -> None:
        """Take back what `saved` gave.

        Raises:
            CacheStateError: when it is not two bases of this rank.
        """
        held: list[mx.array] = [a for a in saved if a is not None]
        if len(held) not in (0, 2) or any(a.ndim != 4 or a.shape[-1] != self.rank for a in held):
            raise CacheStateError(f"the saved bases of leverage are not of rank {self.rank}")
        self.bases = (held[0], held[1]) if held else None
