"""Codes of short vectors: each run of `sub` channels is one entry of a codebook."""

from dataclasses import dataclass
from typing import Literal

from veloxquant.quantizers.sizes import WORD_BYTES, CodecSpec


@dataclass(frozen=True)
class VectorSpec(CodecSpec):
    """Product codes: `dim / sub` codes of `bits` bits a token, in one bit stream.

    `basis` says whether rows are rotated first; `scaled` adds one scale a token, for the Gaussian
    codebook that stands in for a trained one. Source: VecInfer (arXiv 2510.06175).
    """

    sub: int
    bits: int
    basis: Literal["plain", "hadamard"] = "plain"
    scaled: bool = False
    name = "vector"
    codec = "veloxquant.quantizers.vq:VectorCodec"

    def words(self, dim: int) -> int:
        """uint32 words of one token's codes."""
        return -(-(dim // self.sub) * self.bits // 32)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        return tokens * (self.words(dim) * WORD_BYTES + (itemsize if self.scaled else 0))

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit/{self.sub} channels"
