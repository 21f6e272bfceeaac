"""Ranges of the methods that code vectors by codebooks of vectors."""

from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import (
    AFFINE_BITS,
    bits,
    flag,
    idle,
    integer,
    one_of,
    real,
    refuse,
)

MAX_SUB = 64
MAX_CODE_BITS = 16
MAX_NSN_SUB = 12
FIRST_SIGNED = 9
"""Bits from which a fitted codebook is made of signs and magnitudes, as `quantizers.gaussian`."""
MOST_NUMBERS = 1 << 14


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
        width = integer(config, f"{side}_codebook_bits", 1, MAX_CODE_BITS)
        if getattr(config, f"{side}_codebook") is None:
            _trainable(config, side, width)
    integer(config, "residual_length", 0)
    for field in ("smooth_factors", "key_codebook", "value_codebook"):
        given = getattr(config, field)
        if given is not None and not (isinstance(given, list | tuple) or hasattr(given, "shape")):
            raise refuse(field, given, "None or an array of numbers")


def _trainable(config: KVCacheConfig, side: str, width: int) -> None:
    """Codebooks that nobody gave are fitted when caches are built, in seconds rather than minutes.

    From 9 bits on the signs of the channels are bits of the code, and magnitudes only are fitted.
    """
    sub = getattr(config, f"{side}_sub_dim")
    legal = [n for n in range(1, MAX_CODE_BITS + 1) if _fitted_numbers(sub, n) <= MOST_NUMBERS]
    if width not in legal:
        raise refuse(
            f"{side}_codebook_bits", width,
            f"one of {', '.join(map(str, legal))} with {side}_sub_dim={sub} unless {side}_codebook "
            f"is given: larger codebooks take minutes to fit",
        )  # fmt: skip


def _fitted_numbers(sub: int, width: int) -> int:
    """Work to fit a codebook: numbers in it, but centroids of few channels cost as those of 16."""
    signs = sub if width >= max(sub, FIRST_SIGNED) else 0
    return max(sub, 16) << (width - signs)


def check_nsnquant(config: KVCacheConfig) -> None:
    """One or two bits a channel, which fixes the codebook's size; chunks of at least 16 tokens."""
    bits(config, AFFINE_BITS)
    one_of(config, "nsn_bits", (1, 2))
    sub = integer(config, "nsn_subvector_dim", 1, MAX_NSN_SUB)
    if config.head_dim % sub:
        raise refuse("nsn_subvector_dim", sub, f"a divisor of head_dim={config.head_dim}")
    size = integer(config, "nsn_codebook_size", 2)
    if size != 1 << sub:
        raise refuse(
            "nsn_codebook_size", size,
            f"2^nsn_subvector_dim = {1 << sub}: nsn_bits={config.nsn_bits} takes one bit a channel "
            f"for the code" + (" and one for the sign" if config.nsn_bits == 2 else ""),
        )  # fmt: skip
    chunk = integer(config, "nsn_residual_length", 16)
    integer(config, "nsn_seed", 0)
    integer(config, "nsn_max_ctx", chunk)


def check_a2ats(config: KVCacheConfig) -> None:
    """Codes of 1 to 12 bits, a constant distance past the window, a share above zero."""
    bits(config, AFFINE_BITS)
    integer(config, "a2ats_codebook_bits", 1, 12)
    _sub_dim(config, "a2ats_sub_dim")
    window = integer(config, "a2ats_window", 0)
    if integer(config, "a2ats_b", 0) < window:
        raise refuse("a2ats_b", config.a2ats_b, f"at least a2ats_window={window}")
    flag(config, "a2ats_use_query_aware")
    real(config, "a2ats_beta", 0, 1)
    if not config.a2ats_use_query_aware:
        idle(config, "a2ats_beta", "a2ats_use_query_aware=True")
    real(config, "a2ats_retrieval_fraction", 0, 1, open_low=True)
    real(config, "a2ats_rope_base", 10, 1e12)
    if not isinstance(scaling := config.a2ats_rope_scaling, dict | None):
        raise refuse("a2ats_rope_scaling", scaling, "None or a dict with 'type' and 'factor'")
    for field, shapes in (
        ("a2ats_query_h", "(D, D) or (H, D, D)"),
        ("a2ats_codebook", "(2^bits, sub), (n_sub, 2^bits, sub) or (H, n_sub, 2^bits, sub)"),
    ):
        given = getattr(config, field)
        if given is not None and not hasattr(given, "shape"):
            raise refuse(field, given, f"None or an array of shape {shapes}")


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    "vecinfer": check_vecinfer,
    "nsnquant": check_nsnquant,
    "a2ats": check_a2ats,
}
