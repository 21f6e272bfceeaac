"""Affine groups along channels or along tokens."""

from dataclasses import dataclass

from veloxquant.quantizers.sizes import CodecSpec, round_up


@dataclass(frozen=True)
class AffineTokenSpec(CodecSpec):
    """MLX affine groups along D: each token carries a scale and a minimum per `group` channels.

    `minmax` keeps to grids from minimum to maximum at 2 bits too, where `mx.quantize` shifts them.
    Source: the format of `mx.quantize`; KIVI (arXiv 2402.02750) for values.
    """

    bits: int
    group: int
    minmax: bool = False
    name = "affine_token"
    codec = "veloxquant.quantizers.affine:AffineTokenCodec"

    def padded(self, dim: int) -> int:
        """Channels stored: `dim` rounded up to whole groups."""
        return round_up(dim, self.group)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        padded = self.padded(dim)
        return tokens * (padded * self.bits // 8 + 2 * itemsize * padded // self.group)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit/g{self.group}"


@dataclass(frozen=True)
class AffineChannelSpec(CodecSpec):
    """MLX affine groups along T: each channel carries a scale and a minimum per `group` tokens.

    Source: KIVI (arXiv 2402.02750) for keys.
    """

    bits: int
    group: int
    name = "affine_channel"
    codec = "veloxquant.quantizers.affine:AffineChannelCodec"
    token_local = False

    @property
    def block(self) -> int:
        """Tokens that share a scale."""
        return self.group

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, a multiple of `group`."""
        return dim * (tokens * self.bits // 8 + 2 * itemsize * tokens // self.group)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit/channel g{self.group}"
