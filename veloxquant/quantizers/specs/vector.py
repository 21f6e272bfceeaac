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


@dataclass(frozen=True)
class NSNSpec(CodecSpec):
    """Chunks normalised, shifted and normalised again, rotated, then coded `sub` channels at once.

    A code has one bit a channel; `bits` 1 codes signed pieces, 2 codes magnitudes and adds a plane
    of signs. Each token carries two scales, each chunk a mean. Source: NSNQuant (arXiv 2505.18231).
    """

    bits: int
    chunk: int
    sub: int
    seed: int
    name = "nsn"
    codec = "veloxquant.quantizers.nsn:NSNCodec"
    token_local = False

    @property
    def block(self) -> int:
        """Tokens that share a mean."""
        return self.chunk

    def words(self, dim: int) -> int:
        """uint32 words of one token's codes."""
        return -(-dim // 32)

    def sign_words(self, dim: int) -> int:
        """uint32 words of one token's signs."""
        return -(-dim // 32) if self.bits == 2 else 0

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, a multiple of `chunk`."""
        words = self.words(dim) + self.sign_words(dim)
        means = tokens // self.chunk * dim * itemsize
        return tokens * (words * WORD_BYTES + 2 * itemsize) + means

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit/{self.sub} channels, chunks of {self.chunk}"


@dataclass(frozen=True)
class RetrievalSpec(CodecSpec):
    """Codes of position-free keys by which tokens are looked up, without any scale.

    `fitted` codes carry their own codebook a head, fitted to the first `fit_tokens` tokens; others
    use a given one. Source: A2ATS (arXiv 2502.12665).
    """

    sub: int
    bits: int
    fitted: bool = True
    name = "retrieval"
    codec = "veloxquant.quantizers.rope_vq:RetrievalCodec"

    @property
    def fit_tokens(self) -> int:
        """Two tokens an entry: 32 pieces an entry in heads of 128 channels."""
        return max(32, 2 << self.bits) if self.fitted else 0

    def words(self, dim: int) -> int:
        """uint32 words of one token's codes."""
        return -(-(dim // self.sub) * self.bits // 32)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`; the fitted codebook is bf16."""
        del itemsize  # nothing is in the type of the rows
        book = 2 * self.sub << self.bits if self.fitted and tokens else 0
        return tokens * self.words(dim) * WORD_BYTES + book

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit/{self.sub} channels, position-free"
