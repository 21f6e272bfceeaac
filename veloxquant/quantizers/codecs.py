"""From a spec to the codec that computes it."""

import importlib
from functools import lru_cache

from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.sizes import CodecSpec


@lru_cache(maxsize=256)
def codec_for(spec: CodecSpec, dim: int) -> Codec:
    """The codec of one format and head size; the same object for equal arguments."""
    module, name = spec.codec.split(":")
    return getattr(importlib.import_module(module), name)(dim, spec)
