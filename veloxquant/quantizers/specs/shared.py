"""What layers of one group keep together: the first one owns it, the others read it there."""

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Self

from veloxquant.quantizers.sizes import CodecSpec
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.latent import LatentSpec

MERGED_BLOCK = 64
MOST_RETAINED = 0.2
"""Most tokens of a block that stay unmerged."""
NORM_BYTES = 4


@dataclass(frozen=True)
class MemberSpec(CodecSpec):
    """The share of one layer: number `index` of `size` layers that are coded together."""

    index: int = field(default=0, kw_only=True)
    size: int = field(default=1, kw_only=True)
    token_local = False

    def of(self, index: int, size: int) -> Self:
        """The share of another layer."""
        return replace(self, index=index, size=size)

    @property
    def owns(self) -> bool:
        """Whether this layer holds what the others read."""
        return self.index == 0


@dataclass(frozen=True)
class SharedCodesSpec(MemberSpec):
    """Affine groups whose codes are the first layer's; the others have scales and residuals.

    Source: XQuant (arXiv 2510.11236).
    """

    base: AffineChannelSpec | AffineTokenSpec
    residual: int
    name = "shared_codes"
    codec = "veloxquant.quantizers.shared_codes:SharedCodesCodec"

    @property
    def block(self) -> int:
        """Tokens that are coded together."""
        return self.base.group

    @property
    def along_tokens(self) -> bool:
        """Whether groups run along tokens rather than channels."""
        return isinstance(self.base, AffineChannelSpec)

    @property
    def correction(self) -> AffineChannelSpec | AffineTokenSpec | None:
        """Format of the residuals of a layer that reads codes; None without any."""
        if self.owns or not self.residual:
            return None
        return replace(self.base, bits=self.residual)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, a multiple of the block."""
        own = self.base.nbytes(tokens, dim, itemsize)
        if self.owns:
            return own
        width = dim if self.along_tokens else AffineTokenSpec(1, self.base.group).padded(dim)
        own -= width * tokens * self.base.bits // 8
        return own + (self.correction.nbytes(tokens, dim, itemsize) if self.correction else 0)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.base.bits} bit shared by {self.size} layers"


@dataclass(frozen=True)
class MergedSpec(MemberSpec):
    """One direction for a pair of layers and a length for each; unlike tokens of both stay exact.

    Each block has slots for the tokens whose directions differ most. Source: MiniCache
    (arXiv 2405.14366).
    """

    threshold: float
    t: float
    name = "merged"
    codec = "veloxquant.quantizers.merged:MergedCodec"

    @property
    def block(self) -> int:
        """Tokens that share slots."""
        return MERGED_BLOCK

    @property
    def slots(self) -> int:
        """Tokens of a block that can stay unmerged."""
        return 0 if self.threshold <= -1 else ceil(MOST_RETAINED * MERGED_BLOCK) - 1

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, a multiple of the block."""
        lengths = tokens * itemsize
        if self.owns:
            return lengths + tokens * dim * itemsize
        return lengths + tokens // MERGED_BLOCK * self.slots * (dim * itemsize + 1)

    def describe(self) -> str:
        """Short name for tables."""
        return f"directions merged over {self.size} layers"


@dataclass(frozen=True)
class SharedLatentsSpec(MemberSpec):
    """Latents of the rows of several layers side by side; each layer has its part of the basis.

    Source: xKV (arXiv 2503.18893).
    """

    latents: LatentSpec
    name = "shared_latents"
    codec = "veloxquant.quantizers.shared_latents:SharedLatentsCodec"

    @property
    def block(self) -> int:
        """Tokens that are projected at once."""
        return self.latents.block

    @property
    def fit_tokens(self) -> int:
        """Tokens whose second moment gives the basis."""
        return self.latents.fit_tokens

    def kept(self, dim: int) -> int:
        """Latents of a token, for all layers together."""
        return self.latents.kept(self.size * dim)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, with this layer's part of the basis."""
        own = dim * self.kept(dim) * itemsize + NORM_BYTES
        if not self.owns:
            return own
        wide = self.size * dim
        return own + self.latents.nbytes(tokens, wide, itemsize) - wide * self.kept(dim) * itemsize

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.latents.describe()} of {self.size} layers"
