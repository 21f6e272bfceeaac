"""Ranges of the methods that transform, correct or entropy-code whole blocks."""

from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    bits,
    flag,
    integer,
    one_of,
    real,
    refuse,
)

CHUNK = 256
MAX_DIM = 1024
MAX_COMPONENT_BITS = 8
MOST_BETA = 100.0
"""Most that one bit more may be said to divide a component's error by; 4 is that of fine steps."""


def check_gear(config: KVCacheConfig) -> None:
    """Two to four bits, an MLX group size, a rank or a share of energy, few exact entries."""
    bits(config, AFFINE_BITS)
    one_of(config, "gear_bits", (2, 3, 4))
    one_of(config, "gear_group_size", AFFINE_GROUPS)
    if config.gear_rank is not None:
        integer(config, "gear_rank", 0, MAX_DIM)
    share = real(config, "gear_energy_threshold", 0, 1, open_low=True)
    if share == 1:
        raise refuse("gear_energy_threshold", config.gear_energy_threshold, "below 1")
    real(config, "gear_sparse_fraction", 0, 0.1)
    flag(config, "gear_quantize_values")


def check_kvtc(config: KVCacheConfig) -> None:
    """A budget of bits, widths that include none, a decay above one.

    A budget over what the head size can use is allowed; the rest stays empty.
    """
    bits(config, AFFINE_BITS)
    choices = config.kvtc_bit_choices
    listed = isinstance(choices, tuple | list) and all(
        isinstance(n, int) and not isinstance(n, bool) for n in choices
    )
    rises = listed and list(choices) == sorted(set(choices))
    if not rises or len(choices) < 2 or choices[0] != 0 or choices[-1] > MAX_COMPONENT_BITS:
        raise refuse(
            "kvtc_bit_choices", choices, f"increasing integers from 0 up to {MAX_COMPONENT_BITS}"
        )
    integer(config, "kvtc_bit_budget", 0, MAX_DIM * MAX_COMPONENT_BITS)
    real(config, "kvtc_beta", 1, MOST_BETA, open_low=True)


def check_cachegen(config: KVCacheConfig) -> None:
    """Two to eight bits, token groups that divide a chunk, at least one group of layers."""
    bits(config, AFFINE_BITS)
    integer(config, "cachegen_bits", 2, 8)
    if config.cachegen_resolved_bits is not None:
        integer(config, "cachegen_resolved_bits", 2, 8)
    group = integer(config, "cachegen_group_size", 1, CHUNK)
    if CHUNK % group:
        raise refuse("cachegen_group_size", group, f"a divisor of {CHUNK}")
    flag(config, "cachegen_use_delta")
    flag(config, "cachegen_per_channel")
    integer(config, "cachegen_layer_groups", 1)


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    "gear": check_gear,
    "kvtc": check_kvtc,
    "cachegen": check_cachegen,
}
