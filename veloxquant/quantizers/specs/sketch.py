"""Sign sketches: keys by the signs of their projections, alone or behind a codebook."""

from dataclasses import dataclass

from veloxquant.quantizers.sizes import CodecSpec
from veloxquant.quantizers.specs.codebook import code_bytes


@dataclass(frozen=True)
class SketchSpec(CodecSpec):
    """`rows` signs of projections (as many as channels if None) and one norm per token.

    Source: QJL (arXiv 2406.03482).
    """

    rows: int | None
    seed: int
    name = "sketch"
    codec = "veloxquant.quantizers.sketch:SketchCodec"

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        return tokens * (code_bytes(self.rows or dim, 1) + itemsize)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.rows or 'D'} signs"


@dataclass(frozen=True)
class SketchedCodebookSpec(CodecSpec):
    """Rotated codes of `bits` - 1 bits, and a sign sketch of what they leave over.

    `rows` signs, as many as channels if None; a norm of the vector and one of the rest per token.
    One bit is the sketch alone. Source: TurboQuant (arXiv 2504.19874), algorithm 2.
    """

    bits: int
    rows: int | None
    seed: int
    name = "sketched_codebook"
    codec = "veloxquant.quantizers.sketched_codebook:SketchedCodebookCodec"

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        coded = code_bytes(dim, self.bits - 1) + itemsize if self.bits > 1 else 0
        return tokens * (coded + code_bytes(self.rows or dim, 1) + itemsize)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits - 1} bit rotated + {self.rows or 'D'} signs"
