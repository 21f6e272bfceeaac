"""Latents: rows projected on a few directions, and what neighbouring layers share."""

from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from veloxquant.quantizers.sizes import CodecSpec, round_up
from veloxquant.quantizers.specs.affine import AffineTokenSpec
from veloxquant.quantizers.specs.plain import PlainSpec

EXACT_BITS = 16
FIT_TOKENS = 256
PROJECTED = 32
"""Rows that are projected in one product, so that a row never depends on how many come with it."""


def even_bounds(n: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Ranges that cover `n` in order: at most `parts`, nearly equal, the first ones longer."""
    parts = max(1, min(parts, n))
    size, longer = divmod(n, parts)
    ends = [0]
    for i in range(parts):
        ends.append(ends[-1] + size + (i < longer))
    return tuple(pairwise(ends))


def rank_for(rank: int | None, energy: float, dim: int) -> int:
    """Directions that are kept of `dim`.

    The r strongest of `dim` directions hold at least r/dim of the energy, whatever the rows are:
    so a share of energy is a rank that is known before the rows.
    """
    return min(dim, ceil(energy * dim) if rank is None else rank)


@dataclass(frozen=True)
class ScheduledSpec(CodecSpec):
    """Latents of centred rows, strongest first, in equal groups at the bits of `schedule`.

    Scales run along `group` tokens of each latent; groups without bits are left out.
    Source: SVDq (arXiv 2502.15304).
    """

    rank: int | None
    energy: float
    schedule: tuple[int, ...]
    group: int
    name = "scheduled_latents"
    codec = "veloxquant.quantizers.latent:ScheduledCodec"
    token_local = False

    @property
    def block(self) -> int:
        """Tokens that share a scale."""
        return self.group

    @property
    def fit_tokens(self) -> int:
        """Tokens whose covariance gives the basis."""
        return FIT_TOKENS

    def parts(self, dim: int) -> tuple[tuple[int, int, int], ...]:
        """Bits and range of the latents at one width; those without bits are not counted."""
        out: list[tuple[int, int, int]] = []
        rank = rank_for(self.rank, self.energy, dim)
        bounds = even_bounds(rank, len(self.schedule))
        for bits, (start, stop) in zip(self.schedule, bounds, strict=False):
            if out and out[-1][0] == bits and out[-1][2] == start:
                out[-1] = (bits, out[-1][1], stop)
            elif bits:
                out.append((bits, start, stop))
        return tuple(out)

    def live(self, dim: int) -> int:
        """Latents that get a bit."""
        return sum(stop - start for _, start, stop in self.parts(dim))

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, with its basis and mean."""
        codes = sum((stop - start) * bits for bits, start, stop in self.parts(dim)) * tokens // 8
        scales = 2 * itemsize * self.live(dim) * tokens // self.group
        return codes + scales + itemsize * dim * (self.live(dim) + 1)

    def describe(self) -> str:
        """Short name for tables."""
        return f"latents at {'/'.join(map(str, self.schedule))} bit"


@dataclass(frozen=True)
class LatentSpec(CodecSpec):
    """Latents of rows, strongest first: the leading ones at `high` bits, the others at `low`.

    Every token has scales for each `group` of latents; 16 bits leave latents as they are. The
    leading share is rounded up to whole groups.
    Source: Palu (arXiv 2407.21118).
    """

    rank: int | None
    energy: float
    high: int
    low: int
    fraction: float
    group: int
    sample: int = 2 * FIT_TOKENS
    name = "latents"
    codec = "veloxquant.quantizers.latent_rows:LatentCodec"
    token_local = False

    @property
    def block(self) -> int:
        """Tokens that are projected at once."""
        return PROJECTED

    @property
    def fit_tokens(self) -> int:
        """Tokens whose second moment gives the basis."""
        return self.sample

    def kept(self, dim: int) -> int:
        """Latents of a row."""
        return rank_for(self.rank, self.energy, dim)

    def parts(self, dim: int) -> tuple[tuple[CodecSpec, int, int], ...]:
        """Format and range of the leading latents and of the others."""
        kept = self.kept(dim)
        cut = min(kept, round_up(ceil(self.fraction * kept), self.group))
        ranges = ((self.high, 0, cut), (self.low, cut, kept))
        return tuple((self._format(n), low, high) for n, low, high in ranges if high > low)

    def _format(self, bits: int) -> CodecSpec:
        return PlainSpec() if bits == EXACT_BITS else AffineTokenSpec(bits, self.group)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, with its basis."""
        codes = sum(
            spec.nbytes(tokens, high - low, itemsize) for spec, low, high in self.parts(dim)
        )
        return codes + dim * self.kept(dim) * itemsize

    def describe(self) -> str:
        """Short name for tables."""
        return f"latents at {self.high}/{self.low} bit"
