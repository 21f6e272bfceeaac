"""Rows as they came."""

from dataclasses import dataclass

from veloxquant.quantizers.sizes import CodecSpec


@dataclass(frozen=True)
class PlainSpec(CodecSpec):
    """Rows as they came: `dim` elements in the input's type."""

    name = "plain"
    codec = "veloxquant.quantizers.plain:PlainCodec"

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        return tokens * dim * itemsize

    def describe(self) -> str:
        """Short name for tables."""
        return "16 bit"
