"""Codes in a fitted eigenbasis, with more bits for leading directions."""

from dataclasses import dataclass

from veloxquant.quantizers.sizes import CodecSpec
from veloxquant.quantizers.specs.codebook import code_bytes

WORD_LANES = 32
"""Codes of this many directions fill whole words."""


@dataclass(frozen=True)
class SpectralSpec(CodecSpec):
    """Directions by falling variance in `segments` of (directions, bits), and a norm per token.

    `signs` is the size of a sign sketch of the first segment's residual, 0 for none; it comes with
    a norm of its own. `unbiased` is for keys. Source: SpectralQuant (Dynamis-Labs/spectralquant).
    """

    segments: tuple[tuple[int, int], ...]
    signs: int
    seed: int
    unbiased: bool
    name = "spectral"
    codec = "veloxquant.quantizers.spectral:SpectralCodec"

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        del dim  # the segments cover it
        coded = sum(code_bytes(n, bits) for n, bits in self.segments)
        sketched = code_bytes(self.signs, 1) + itemsize if self.signs else 0
        return tokens * (coded + sketched + itemsize)

    def describe(self) -> str:
        """Short name for tables."""
        parts = "+".join(f"{n}×{bits}" for n, bits in self.segments)
        return f"{parts} bit eigenbasis" + (f" + {self.signs} signs" if self.signs else "")


def segments(dim: int, bits: int, leading: int, most: int) -> tuple[tuple[int, int], ...]:
    """Widths of directions that average `bits`: one more at the front, one less at the end.

    `leading` directions are widened to whole words and as many at the end pay for them; without
    any, without room, or without a wider table than `most` bits, all get the same.
    """
    front = -(-leading // WORD_LANES) * WORD_LANES
    front = min(front, dim // 2 // WORD_LANES * WORD_LANES)
    if not front or bits + 1 > most:
        return ((dim, bits),)
    middle = ((dim - 2 * front, bits),) if dim > 2 * front else ()
    # The last segment may be short of whole words: what it pays is what its words hold.
    return ((front, bits + 1), *middle, (front, bits - 1))
