"""Corrected groups, transformed components, chunks of integer codes."""

from dataclasses import dataclass
from math import ceil

from veloxquant.quantizers.sizes import CodecSpec, round_up
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec

SCALE_BYTES, ENERGY_BYTES = 4, 8


@dataclass(frozen=True)
class CorrectedSpec(CodecSpec):
    """Affine groups, plus low-rank factors of their error and a few exact entries, by blocks.

    `rank` is that of each block of `block_tokens`, None for the one that `energy` asks for. With
    `fraction` above 0 the outliers of each token, that share of its channels, are kept apart.
    Source: GEAR (arXiv 2403.05527).
    """

    base: AffineChannelSpec | AffineTokenSpec
    block_tokens: int
    rank: int | None
    energy: float
    fraction: float
    name = "corrected"
    codec = "veloxquant.quantizers.corrected:CorrectedCodec"
    token_local = False

    @property
    def block(self) -> int:
        """Tokens that share low-rank factors."""
        return self.block_tokens

    @property
    def along_tokens(self) -> bool:
        """Whether groups run along tokens rather than channels."""
        return isinstance(self.base, AffineChannelSpec)

    def rank_for(self, dim: int) -> int:
        """Rank of every block.

        Rounding errors are nearly white, and of white noise r of `dim` directions hold about
        r/dim of the energy: a large share would take as much room as the rows. Hence the cap.
        """
        if self.rank is not None:
            return min(self.rank, dim)
        return max(1, min(dim // 32, ceil(self.energy * dim)))

    def factors_coded(self, dim: int) -> bool:
        """Whether factors have 8 bits: while they are few, their rounding is far below the error.

        With many they are to give the rows back, and stay in the rows' own type.
        """
        return self.rank_for(dim) <= dim // 8

    def slots(self, dim: int) -> int:
        """Exact entries of each token."""
        return 2 * ceil(self.fraction * dim / 2) if self.fraction > 0 else 0

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, a multiple of the block."""
        blocks, rank = tokens // self.block_tokens, self.rank_for(dim)
        size = 1 if self.factors_coded(dim) else itemsize
        out = self.base.nbytes(tokens, dim, itemsize) + rank * size * tokens
        if rank:
            out += (rank * (dim * size + SCALE_BYTES) + ENERGY_BYTES) * blocks
        index = 1 if dim <= 256 else 2
        return out + tokens * self.slots(dim) * (itemsize + index)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.base.describe()} corrected"


PROJECTED = 64
"""Rows that are projected in one product, so that a row never depends on how many come with it."""


@dataclass(frozen=True)
class TransformSpec(CodecSpec):
    """Principal components at widths of their own: `budget` bits a token, dropped ones for free.

    Basis and widths are fitted to the first tokens and kept for each head. All widths of a token
    lie in one bit stream, so its size is the budget whatever they are.
    Source: KVTC (arXiv 2511.01815).
    """

    budget: int
    choices: tuple[int, ...]
    beta: float
    name = "transform"
    codec = "veloxquant.quantizers.transform:TransformCodec"
    token_local = False

    @property
    def fit_tokens(self) -> int:
        """Tokens whose covariance gives the basis."""
        return 256

    def words(self, dim: int) -> int:
        """uint32 words of one token."""
        return max(1, ceil(min(self.budget, dim * self.choices[-1]) / 32))

    def components(self, dim: int) -> int:
        """Most components that can get a bit."""
        least = min((width for width in self.choices if width), default=1)
        return max(1, min(dim, self.budget // least))

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, with its basis."""
        words, kept = self.words(dim), self.components(dim)
        basis = dim * kept * itemsize
        tables = 2 * dim * 4 + kept * (4 + 1) + 32 * words * 2
        return tokens * words * 4 + basis + tables

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.budget} bits/token PCA"


@dataclass(frozen=True)
class ChunkSpec(CodecSpec):
    """One scale and minimum for each channel of a chunk of `size` tokens.

    Source: CacheGen (arXiv 2310.07240), with a scale for each channel.
    """

    bits: int
    size: int
    name = "chunk"
    codec = "veloxquant.quantizers.chunk:ChunkCodec"
    token_local = False

    @property
    def block(self) -> int:
        """Tokens of a chunk."""
        return self.size

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, a multiple of the chunk."""
        return dim * (tokens * self.bits // 8 + 2 * itemsize * tokens // self.size)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit/channel of {self.size}"


@dataclass(frozen=True)
class SymmetricSpec(CodecSpec):
    """One scale for each token, codes symmetric about zero: 2^bits - 1 levels.

    Source: CacheGen (arXiv 2310.07240), its published quantizer.
    """

    bits: int
    name = "symmetric"
    codec = "veloxquant.quantizers.chunk:SymmetricCodec"

    def padded(self, dim: int) -> int:
        """Channels stored."""
        return round_up(dim, 32)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        return tokens * (self.padded(dim) * self.bits // 8 + itemsize)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit/token symmetric"
