"""Ranges of the methods that code vectors by codebooks of vectors."""

from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import VecInferOptions
from veloxquant.config.ranges import AFFINE_BITS, NO_OUTLIERS, bits, integer, refuse, unused

MAX_SUB = 64
MAX_CODE_BITS = 16


def _sub_dim(config: KVCacheConfig, field: str) -> int:
    """Channels of a code, which must cut a head into whole pieces."""
    sub = integer(config, field, 1, MAX_SUB)
    if config.head_dim % sub:
        raise refuse(field, sub, f"a divisor of head_dim={config.head_dim}")
    return sub


def check_vecinfer(config: KVCacheConfig) -> None:
    """Pieces that divide the head, codes of 1 to 16 bits; shapes of tables are checked later."""
    bits(config, AFFINE_BITS)
    for side in ("key", "value"):
        _sub_dim(config, f"{side}_sub_dim")
        integer(config, f"{side}_codebook_bits", 1, MAX_CODE_BITS)
    if isinstance(config.options, VecInferOptions):
        integer(config, "residual_length", 0)
    unused(config, NO_OUTLIERS)


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {"vecinfer": check_vecinfer}
