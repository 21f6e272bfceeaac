"""Formats that build on affine groups: reordered and clipped groups."""

from dataclasses import dataclass

from veloxquant.quantizers.sizes import CodecSpec, round_up
from veloxquant.quantizers.specs.affine import AffineTokenSpec

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


def fit_length(window: int) -> int:
    """Tokens that constants are fitted to: the first window, at least one growth step."""
    return round_up(max(window, 32), 32)
