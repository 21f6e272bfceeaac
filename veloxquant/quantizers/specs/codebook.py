"""Rotated scalar codebooks."""

from dataclasses import dataclass
from typing import Literal

from veloxquant.quantizers.sizes import WORD_BYTES, CodecSpec, round_up


def bit_planes(bits: int) -> tuple[tuple[int, int], ...]:
    """Width and shift of each plane of codes, high bits first; widths divide a word."""
    coarse = {1: (), 2: (1,), 3: (2,), 4: (2, 1), 5: (4,), 6: (4, 1)}[bits]
    out, left = [], bits
    for width in (*coarse, 1):
        left -= width
        out.append((width, left))
    return tuple(out)


def code_bytes(width: int, bits: int) -> int:
    """Bytes of one token's codes of `width` channels."""
    return round_up(width, 32) // 32 * bits * WORD_BYTES


@dataclass(frozen=True)
class CodebookSpec(CodecSpec):
    """Rotated codes and one norm per token.

    `unbiased` picks the norm: for keys the one that leaves inner products unbiased, for values the
    one with least squared error. `table` is "flat", the Lloyd–Max levels, or "embedded", whose last
    bit can be dropped. Source: TurboQuant (arXiv 2504.19874).
    """

    bits: int
    seed: int
    unbiased: bool
    table: Literal["flat", "embedded"] = "embedded"
    name = "codebook"
    codec = "veloxquant.quantizers.codebook:CodebookCodec"

    def planes(self) -> tuple[tuple[int, int], ...]:
        """Width and shift of each plane, high bits first."""
        return bit_planes(self.bits)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        return tokens * (code_bytes(dim, self.bits) + itemsize)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit rotated"
