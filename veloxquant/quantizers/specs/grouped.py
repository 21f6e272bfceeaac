"""Formats that build on affine groups: reordered and clipped groups, boosted channels."""

import math
from dataclasses import dataclass

from veloxquant.quantizers.sizes import CodecSpec, round_up
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec

SMALL_INDEX = 256
"""Channels up to which a channel number takes one byte."""
FACTOR_BYTES = 4


def index_bytes(dim: int) -> int:
    """Bytes of a channel number among `dim`."""
    return 1 if dim <= SMALL_INDEX else 2


@dataclass(frozen=True)
class PermutedSpec(CodecSpec):
    """Affine groups along D of reordered channels, their ranges shrunk by one factor a head.

    Order and factor of each head are fitted to the first `fit` tokens; `clip` is the factor without
    a search and the largest one with it. Source: SKVQ (arXiv 2405.06219).
    """

    bits: int
    group: int
    fit: int
    reorder: bool = True
    search: bool = True
    clip: float = 1.0
    name = "permuted"
    codec = "veloxquant.quantizers.permuted:PermutedCodec"

    @property
    def rows(self) -> AffineTokenSpec:
        """The format of the reordered rows."""
        return AffineTokenSpec(self.bits, self.group, minmax=True)

    @property
    def fit_tokens(self) -> int:
        """Tokens that order and factor are fitted to; 0 when both are given."""
        return self.fit if self.reorder or self.search else 0

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        order = index_bytes(dim) * dim if self.reorder else 0
        factor = FACTOR_BYTES if self.search else 0
        return self.rows.nbytes(tokens, dim, itemsize) + (order + factor if tokens else 0)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit/g{self.group} reordered"


@dataclass(frozen=True)
class BoostedSpec(CodecSpec):
    """Affine groups along T, in which the liveliest channels of every page have more bits.

    A page is one group of `group` tokens. All channels lie in a plane of `low` bits; the share
    `fraction` of them has the rest of its `high` bits in a second plane, with their numbers.
    Source: Kitty (arXiv 2511.18643).
    """

    low: int
    high: int
    group: int
    fraction: float
    name = "boosted"
    codec = "veloxquant.quantizers.boosted:BoostedCodec"
    token_local = False

    @property
    def base(self) -> AffineChannelSpec:
        """The format of the plane that all channels lie in."""
        return AffineChannelSpec(self.low, self.group)

    @property
    def block(self) -> int:
        """Tokens of a page."""
        return self.group

    def boosted(self, dim: int) -> int:
        """Boosted channels of a page."""
        return math.floor(self.fraction * dim + 1e-9)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, a multiple of `group`."""
        planes = tokens * (self.high - self.low) // 8 + tokens // self.group * index_bytes(dim)
        return self.base.nbytes(tokens, dim, itemsize) + self.boosted(dim) * planes

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.low}/{self.high} bit/channel g{self.group}"


def fit_length(window: int) -> int:
    """Tokens that constants are fitted to: the first window, at least one growth step."""
    return round_up(max(window, 32), 32)
