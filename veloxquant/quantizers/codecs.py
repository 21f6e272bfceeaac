"""From a spec to the codec that computes it."""

from functools import lru_cache

from veloxquant.quantizers.affine import AffineChannelCodec, AffineTokenCodec
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.codebook import CodebookCodec
from veloxquant.quantizers.plain import PlainCodec
from veloxquant.quantizers.sizes import (
    AffineChannelSpec,
    AffineTokenSpec,
    CodebookSpec,
    CodecSpec,
    PlainSpec,
)

_CODECS = {
    PlainSpec: PlainCodec,
    AffineTokenSpec: AffineTokenCodec,
    AffineChannelSpec: AffineChannelCodec,
    CodebookSpec: CodebookCodec,
}


@lru_cache(maxsize=256)
def codec_for(spec: CodecSpec, dim: int) -> Codec:
    """The codec of one format and head size; the same object for equal arguments."""
    return _CODECS[type(spec)](dim, spec)
