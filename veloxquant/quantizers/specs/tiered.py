"""Formats of tokens that are coded by age or by class."""

import math
from dataclasses import dataclass

from veloxquant.quantizers.sizes import CodecSpec, round_up
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec


@dataclass(frozen=True)
class NestedChannelSpec(AffineChannelSpec):
    """Affine groups along T whose grid was reached through the grids of `chain`, widest first.

    `bits` is the last of them: how the codes are stored now.
    """

    chain: tuple[int, ...] = ()
    name = "nested_channel"
    codec = "veloxquant.quantizers.nested:NestedChannelCodec"


@dataclass(frozen=True)
class NestedTokenSpec(AffineTokenSpec):
    """Affine groups along D whose grid was reached through the grids of `chain`, widest first."""

    chain: tuple[int, ...] = ()
    name = "nested_token"
    codec = "veloxquant.quantizers.nested:NestedTokenCodec"


def widest_group(dim: int, bits: int) -> int:
    """Channels of a group with which a token of `dim` channels takes the fewest bytes."""

    def cost(group: int) -> int:
        return AffineTokenSpec(bits, group).nbytes(1, dim, 2)

    return min((128, 64, 32), key=cost)


@dataclass(frozen=True)
class ScaledTokenSpec(CodecSpec):
    """Affine rows divided by a factor a channel, which is fitted to `first` tokens.

    With equal ranges one scale can serve many channels: groups are as wide as `dim` allows.
    Source: ZipCache (arXiv 2405.14256), channel-separable token-wise quantization.
    """

    bits: int
    first: int
    name = "scaled_token"
    codec = "veloxquant.quantizers.scaled:ScaledTokenCodec"

    @property
    def fit_tokens(self) -> int:
        """Tokens whose extremes give the factors."""
        return self.first

    def affine(self, dim: int) -> AffineTokenSpec:
        """Format of the divided rows."""
        return AffineTokenSpec(self.bits, widest_group(dim, self.bits))

    def constant_nbytes(self, dim: int, itemsize: int) -> int:
        """Bytes of the factors of one head."""
        return dim * itemsize

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        rows = self.affine(dim).nbytes(tokens, dim, itemsize)
        return rows + self.constant_nbytes(dim, itemsize)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit/token"


@dataclass(frozen=True)
class ClassedSpec(CodecSpec):
    """Blocks of `size` tokens in classes of fixed sizes, each class in a format of its own.

    `classes` holds (tokens of a block, format), the most precise first. Which token is in which
    class is stored in `map_bits` a token. Constants are fitted once and shared by the classes.
    """

    size: int
    classes: tuple[tuple[int, CodecSpec], ...]
    name = "classed"
    codec = "veloxquant.quantizers.classed:ClassedCodec"
    token_local = False

    @property
    def block(self) -> int:
        """Tokens that are sorted into classes together."""
        return self.size

    @property
    def fit_tokens(self) -> int:
        """First tokens that shared constants are fitted to."""
        return max(spec.fit_tokens for _, spec in self.classes)

    @property
    def map_bits(self) -> int:
        """Bits of a class number."""
        return 1 if len(self.classes) == 2 else 2

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, a multiple of the block."""
        total, shared = tokens * self.map_bits // 8, 0
        for count, spec in self.classes:
            constants = _constant_nbytes(spec, dim, itemsize)
            if count:
                total += spec.nbytes(tokens // self.size * count, dim, itemsize) - constants
            shared = max(shared, constants)
        return total + shared

    def describe(self) -> str:
        """Short name for tables."""
        parts = (f"{n}/{self.size} at {spec.describe()}" for n, spec in self.classes if n)
        return ", ".join(parts)

    def vacant(self) -> tuple[int, ...]:
        """First places of each class that hold no token in the first block."""
        return (0,) * len(self.classes)


def _constant_nbytes(spec: CodecSpec, dim: int, itemsize: int) -> int:
    count = getattr(spec, "constant_nbytes", None)
    return count(dim, itemsize) if count else 0


@dataclass(frozen=True)
class PrefixTokenSpec(CodecSpec):
    """Affine groups of the `rank` share of channels that vary most; the others by their mean.

    Order and means are fitted to `first` tokens. `pairs` keeps channels d and d + D/2 together, as
    rotary positions do. Kept channels are rounded up to whole groups.
    """

    bits: int
    group: int
    rank: float
    first: int
    pairs: bool
    name = "prefix_token"
    codec = "veloxquant.quantizers.prefix:PrefixTokenCodec"

    @property
    def fit_tokens(self) -> int:
        """Tokens that the order of channels is fitted to."""
        return self.first

    def kept(self, dim: int) -> int:
        """Channels stored."""
        return min(dim, round_up(math.ceil(self.rank * dim), self.group))

    def affine(self) -> AffineTokenSpec:
        """Format of the kept channels."""
        return AffineTokenSpec(self.bits, self.group)

    def constant_nbytes(self, dim: int, itemsize: int) -> int:
        """Bytes of order and means of one head."""
        return dim * (2 + itemsize)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        rows = self.affine().nbytes(tokens, self.kept(dim), itemsize)
        return rows + self.constant_nbytes(dim, itemsize)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit of {self.rank:.0%}"
