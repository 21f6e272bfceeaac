"""Recursive polar angles."""

from dataclasses import dataclass

from veloxquant.quantizers.sizes import WORD_BYTES, CodecSpec, round_up

CIRCLE_BITS = 2
"""Bits that angles of a full circle get beyond those of a quarter."""


@dataclass(frozen=True)
class PolarSpec(CodecSpec):
    """Angles of a binary tree over the rotated coordinates, and one radius per token.

    `bits` for every angle between radii, `CIRCLE_BITS` more for those between coordinates.
    `unbiased` picks the radius: for keys the one that leaves inner products unbiased, for values
    the one of least squared error. Source: PolarQuant (arXiv 2502.02617).
    """

    bits: int
    seed: int
    unbiased: bool
    name = "polar"
    codec = "veloxquant.quantizers.polar:PolarCodec"

    def words(self, dim: int) -> tuple[int, int]:
        """uint32 words of one token: angles between coordinates, and all the others."""
        pairs = dim // 2
        circle = round_up(pairs, 32) * (self.bits + CIRCLE_BITS) // 32
        return circle, round_up(pairs - 1, 32) * self.bits // 32

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        return tokens * (sum(self.words(dim)) * WORD_BYTES + itemsize)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit angles"
