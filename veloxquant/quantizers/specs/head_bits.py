"""Affine groups whose width differs by head and block, in planes of exactly planned size."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

from veloxquant.quantizers.sizes import CodecSpec
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec

MARK_BYTES = 4
"""Of each tile and of each block and head: which block, head, plane or width it is."""
SUM_BYTES = 8
"""Of each block and head of keys: two running sums in fp32."""
_DIGITS = 10_000


class TilePlan:
    """How many tiles the first blocks of a layer take, whatever their heads look like.

    Every block gets the most tiles, in numbers that the heads can take, that keep the mean of all
    blocks up to it at `rate`. What a block leaves over goes to the next one, and decides all that
    follow. It is a multiple of the rate's smallest part and below the widest step between numbers,
    so it comes again, and from there on the plan repeats: any length is planned from one period.
    """

    def __init__(self, rate: Fraction, heads: int, units: tuple[int, int]) -> None:
        assert rate >= 0, f"{rate} tiles a block"
        self.rate = rate
        middle, most = units
        sums = sorted(
            {i * middle + j * most for i in range(heads + 1) for j in range(heads + 1 - i)}
        )
        # In parts of the rate; more than every head's most is never taken.
        parts = rate.denominator
        added = min(rate.numerator, sums[-1] * parts)
        self._after, left = [0], 0
        first_with: dict[int, int] = {}
        while left not in first_with:
            first_with[left] = len(self._after) - 1
            room = left + added
            taken = sums[bisect_right(sums, room // parts) - 1]
            self._after.append(self._after[-1] + taken)
            left = room - taken * parts
        self._start = first_with[left]
        self._period = len(self._after) - 1 - self._start
        self._tiles = self._after[-1] - self._after[self._start]

    def after(self, blocks: int) -> int:
        """Tiles of the first `blocks` blocks."""
        rounds, rest = divmod(max(0, blocks - self._start), self._period)
        return self._after[min(blocks, self._start) + rest] + rounds * self._tiles


@lru_cache(maxsize=64)
def _tile_plan(rate: Fraction, heads: int, units: tuple[int, int]) -> TilePlan:
    return TilePlan(rate, heads, units)


@dataclass(frozen=True)
class HeadBitsSpec(CodecSpec):
    """What keys and values have in common.

    `heads` of a layer share a budget of `target` bits an element: every block of `group` tokens
    gives each head one of three widths. All heads lie in a plane of the low width; what a head has
    above it lies in tiles of `unit` bits, of which every block has a planned number.
    """

    choices: tuple[int, int, int]
    target: float
    heads: int
    group: int
    token_local = False

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.group

    @property
    def unit(self) -> int:
        """Bits of a tile."""
        low, middle, high = self.choices
        return math.gcd(middle - low, high - low)

    @property
    def units(self) -> tuple[int, int]:
        """Tiles of a head of the middle and of the high width."""
        low, middle, high = self.choices
        return (middle - low) // self.unit, (high - low) // self.unit

    @cached_property
    def tiles(self) -> TilePlan:
        """Tiles of a layer by number of blocks."""
        extra = Fraction(self.target).limit_denominator(_DIGITS) - self.choices[0]
        return _tile_plan(extra * self.heads / self.unit, self.heads, self.units)

    def extra_bytes(self, tokens: int, width: int) -> int:
        """Bytes of tiles and marks, a head's share; a tile has `width` codes a token."""
        blocks = tokens // self.group
        tile = self.group * width * self.unit // 8 + MARK_BYTES
        return self.tiles.after(blocks) * tile // self.heads + blocks * MARK_BYTES

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.target:g} bit by head g{self.group}"


@dataclass(frozen=True)
class HeadBitsChannelSpec(HeadBitsSpec):
    """Groups along T, and the statistics that widths follow: for keys.

    Widths are chosen anew every `interval` blocks, by `importance` ("norm_variance" or
    "attention_entropy" over the newest `window` keys of a block).
    """

    interval: int
    importance: str
    window: int
    name = "head_bits_channel"
    codec = "veloxquant.quantizers.head_bits:HeadBitsChannelCodec"

    @property
    def base(self) -> AffineChannelSpec:
        """The plane that all heads lie in."""
        return AffineChannelSpec(self.choices[0], self.group)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, a multiple of `group`."""
        sums = tokens // self.group * SUM_BYTES
        return self.base.nbytes(tokens, dim, itemsize) + self.extra_bytes(tokens, dim) + sums


@dataclass(frozen=True)
class HeadBitsTokenSpec(HeadBitsSpec):
    """Groups along D, in the widths that the keys of the same block got: for values."""

    name = "head_bits_token"
    codec = "veloxquant.quantizers.head_bits:HeadBitsTokenCodec"

    @property
    def base(self) -> AffineTokenSpec:
        """The plane that all heads lie in."""
        return AffineTokenSpec(self.choices[0], self.group)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, a multiple of `group`."""
        base, width = self.base, self.base.padded(dim)
        return base.nbytes(tokens, dim, itemsize) + self.extra_bytes(tokens, width)
