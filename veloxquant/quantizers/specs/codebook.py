"""Rotated scalar codebooks."""

from dataclasses import dataclass

from veloxquant.quantizers.sizes import WORD_BYTES, CodecSpec, round_up


@dataclass(frozen=True)
class CodebookSpec(CodecSpec):
    """Rotated Lloyd–Max codes in two planes (`bits`-1 and 1 bit) and one norm per token.

    `unbiased` picks the norm: for keys the one that leaves inner products unbiased, for values the
    one with least squared error. Source: TurboQuant (arXiv 2504.19874), `methods/turboquant_rvq`.
    """

    bits: int
    seed: int
    unbiased: bool
    name = "codebook"
    codec = "veloxquant.quantizers.codebook:CodebookCodec"

    def planes(self) -> tuple[tuple[int, int], ...]:
        """Width and shift of each plane, high bits first; widths divide a word."""
        coarse = {1: (), 2: (1,), 3: (2,), 4: (2, 1), 5: (4,), 6: (4, 1)}[self.bits]
        out, left = [], self.bits
        for width in (*coarse, 1):
            left -= width
            out.append((width, left))
        return tuple(out)

    def plane_words(self, dim: int) -> tuple[int, int]:
        """uint32 words of the coarse and of the refinement plane of one token."""
        lanes = round_up(dim, 32) // 32
        return lanes * max(1, self.bits - 1), lanes if self.bits > 1 else 0

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        return tokens * (sum(self.plane_words(dim)) * WORD_BYTES + itemsize)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit rotated"
