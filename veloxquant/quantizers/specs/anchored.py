"""Tokens as multiples of anchor tokens, some with a coded residual."""

from dataclasses import dataclass

from veloxquant.quantizers.sizes import CodecSpec
from veloxquant.quantizers.specs.codebook import CodebookSpec
from veloxquant.quantizers.specs.tiered import ClassedSpec

ID_BYTES = 2
MAX_ANCHORS = 1 << (8 * ID_BYTES)


@dataclass(frozen=True)
class ProjectedSpec(CodecSpec):
    """Number of an anchor and a factor; with `bits` the rest in a rotated codebook too.

    Without `numbered` the numbers are those of another store.
    """

    bits: int
    seed: int
    numbered: bool = True
    name = "projected"
    codec = "veloxquant.quantizers.anchored:ProjectedCodec"
    token_local = False

    def residual(self) -> CodebookSpec | None:
        """Format of what the anchor leaves over, None where that is dropped."""
        return CodebookSpec(self.bits, self.seed, unbiased=False) if self.bits else None

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, anchors not counted."""
        rest = self.residual()
        coded = rest.nbytes(tokens, dim, itemsize) if rest else 0
        return coded + tokens * (ID_BYTES * self.numbered + itemsize)

    def describe(self) -> str:
        """Short name for tables."""
        return f"anchor + {self.bits} bit" if self.bits else "anchor"


@dataclass(frozen=True)
class AnchorSpec(ClassedSpec):
    """Blocks with `anchors` exact tokens each; the others are multiples of any anchor before.

    The first class has coded residuals, the second none. Without `owns` the numbers of anchors and
    the classes of tokens are those of another store. The first `lead` places of the first block
    hold no token; they are in the last class as far as that has room.
    """

    anchors: int = 1
    owns: bool = True
    lead: int = 0
    name = "anchored"
    codec = "veloxquant.quantizers.anchored:AnchorCodec"

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, a multiple of the block."""
        exact = tokens // self.size * self.anchors * dim * itemsize
        lent = 0 if self.owns else tokens * self.map_bits // 8
        return super().nbytes(tokens, dim, itemsize) - lent + exact

    def vacant(self) -> tuple[int, ...]:
        """First places of each class that hold no token in the first block."""
        (slots, _), (others, _) = self.classes
        last = min(self.lead, others)
        return min(self.lead - last, slots), last
