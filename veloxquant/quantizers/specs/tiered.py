"""Formats of tokens that are coded by age or by class."""

from dataclasses import dataclass

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
