"""Recursive polar angles."""

from dataclasses import dataclass

from veloxquant.quantizers.sizes import WORD_BYTES, CodecSpec, round_up


@dataclass(frozen=True)
class PolarSpec(CodecSpec):
    """Angles of a binary tree over the rotated coordinates, and one radius per token.

    `bits` for every angle, and the signs of the coordinates, which make those between coordinates
    two bits wider.
    `unbiased` picks the radius: for keys the one that leaves inner products unbiased, for values
    the one of least squared error. Source: PolarQuant (arXiv 2502.02617).
    """

    bits: int
    seed: int
    unbiased: bool
    name = "polar"
    codec = "veloxquant.quantizers.polar:PolarCodec"

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        lanes = round_up(dim, 32) + round_up(dim - 1, 32) * self.bits
        return tokens * (lanes // 32 * WORD_BYTES + itemsize)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit angles"
