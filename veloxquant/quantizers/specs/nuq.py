"""Fitted, unequally spaced levels with exact outliers in fixed slots."""

import math
from abc import abstractmethod
from dataclasses import dataclass

from veloxquant.quantizers.sizes import CodecSpec, round_up
from veloxquant.quantizers.specs.grouped import index_bytes

LEVEL_BYTES = 4
WORD_BITS = 32


@dataclass(frozen=True)
class NuqSpec(CodecSpec):
    """What keys and values have in common.

    Levels are fitted to the first `fit` tokens, or with a `refit` to every block of so many tokens.
    The share `fraction` of each token's entries, rounded up, lies in slots: a channel number and
    what the level misses. Source: KVQuant (arXiv 2401.18079).
    """

    bits: int
    sweeps: int
    fraction: float
    fit: int
    refit: int
    token_local = False

    @property
    def block(self) -> int:
        """Tokens that share one table if it is fitted again and again."""
        return self.refit or 1

    @property
    def fit_tokens(self) -> int:
        """First tokens that the only table is fitted to."""
        return 0 if self.refit else self.fit

    def slots(self, dim: int) -> int:
        """Exact entries of a token."""
        return math.ceil(self.fraction * dim - 1e-9)

    @abstractmethod
    def lanes(self, dim: int) -> int:
        """Codes stored for a token, whole words of them."""

    def tables(self, tokens: int) -> int:
        """Versions of the constants in a store of `tokens`."""
        return tokens // self.refit if self.refit else int(tokens > 0)

    def row_bytes(self, dim: int, itemsize: int) -> int:
        """Bytes of a token's codes and slots."""
        codes = self.lanes(dim) * self.bits // 8
        return codes + self.slots(dim) * (itemsize + index_bytes(dim))

    def level_bytes(self) -> int:
        """Bytes of the levels of one table."""
        return LEVEL_BYTES << self.bits


@dataclass(frozen=True)
class NuqChannelSpec(NuqSpec):
    """Levels times the range of each channel, which the table fixes, and a token's: for keys."""

    name = "nuq_channel"
    codec = "veloxquant.quantizers.nuq:NuqChannelCodec"

    def lanes(self, dim: int) -> int:
        """Codes stored for a token, whole words of them."""
        return round_up(dim, WORD_BITS)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        table = 2 * dim * itemsize + self.level_bytes()
        row = self.row_bytes(dim, itemsize) + itemsize
        return tokens * row + self.tables(tokens) * table

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit levels/channel"


@dataclass(frozen=True)
class NuqTokenSpec(NuqSpec):
    """Levels times the range of `group` channels of each token: for values."""

    group: int
    name = "nuq_token"
    codec = "veloxquant.quantizers.nuq:NuqTokenCodec"

    def lanes(self, dim: int) -> int:
        """Codes stored for a token: whole groups of them."""
        return round_up(dim, self.group)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        row = self.row_bytes(dim, itemsize) + 2 * itemsize * self.lanes(dim) // self.group
        return tokens * row + self.tables(tokens) * self.level_bytes()

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit levels/g{self.group}"
