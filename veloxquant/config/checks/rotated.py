"""Ranges of the methods that rotate vectors and code their coordinates."""

from collections.abc import Callable

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import (
    AFFINE_BITS,
    CODEBOOK_BITS,
    bits,
    flag,
    idle,
    integer,
    one_of,
    refuse,
)
from veloxquant.config.rotations import DEFAULT_NAME, is_plain_name, rotations_file

MAX_SIGNS = 4096
FLOATS = ("mlx.core.float32", "mlx.core.float16", "mlx.core.bfloat16")


def check_turboquant_rvq(config: KVCacheConfig) -> None:
    """Total bits 1 to 6; outlier settings belong to the standalone methods."""
    bits(config, CODEBOOK_BITS)


def check_turboquant_mse(config: KVCacheConfig) -> None:
    """Bits 1 to 6, and the settings of loud channels."""
    bits(config, CODEBOOK_BITS)
    _outliers(config, CODEBOOK_BITS)
    _standalone(config)


def check_turboquant_prod(config: KVCacheConfig) -> None:
    """As turboquant_mse, with a number of signs."""
    bits(config, CODEBOOK_BITS)
    _signs(config)
    _outliers(config, CODEBOOK_BITS)
    _standalone(config)


def check_qjl(config: KVCacheConfig) -> None:
    """Affine bits of the values and a number of signs; signs have no width to choose."""
    bits(config, AFFINE_BITS)
    _signs(config)
    _outliers(config, AFFINE_BITS)
    _standalone(config)


def check_polar(config: KVCacheConfig) -> None:
    """Bits of the upper angles; no outliers, no sketch."""
    bits(config, CODEBOOK_BITS)
    _standalone(config)


def check_spectral(config: KVCacheConfig) -> None:
    """Bits, sizes of the signal block, and rotations that exist where a name is given."""
    bits(config, CODEBOOK_BITS)
    for field in ("spectral_key_d_eff", "spectral_val_d_eff"):
        integer(config, field, 0)
    flag(config, "spectral_apply_qjl")
    name = config.spectral_model_name
    known = is_plain_name(name) and (name == DEFAULT_NAME or rotations_file(name).is_file())
    if not known:
        raise refuse(
            "spectral_model_name", name,
            f"{DEFAULT_NAME!r} or a name that rotations were saved under, see "
            f"veloxquant.spectral.calibrate",
        )  # fmt: skip
    _standalone(config)


def _signs(config: KVCacheConfig) -> None:
    """Whole bytes of signs."""
    if config.jl_dim is None:
        return
    rows = integer(config, "jl_dim", 8, MAX_SIGNS)
    if rows % 8:
        raise refuse("jl_dim", rows, "a multiple of 8")


def _outliers(config: KVCacheConfig, legal: tuple[int, ...]) -> None:
    """Loud channels leave at least one other; their bits and calibration set are possible.

    Only the documented example of turboquant_prod names bits of loud channels that it has not.
    """
    if config.bit_width_outlier is not None:
        one_of(config, "bit_width_outlier", legal)
    if config.n_outlier_channels is not None:
        integer(config, "n_outlier_channels", 0, config.head_dim - 1)
    if config.n_calib_tokens is not None:
        integer(config, "n_calib_tokens", 1)
    split = flag(config, "enable_outlier_two_stream")
    if split and not config.n_outlier_channels:
        raise refuse(
            "n_outlier_channels", config.n_outlier_channels,
            "at least 1 when enable_outlier_two_stream is set",
        )  # fmt: skip
    documented = config.method == "turboquant_prod" and config.n_outlier_channels is None
    if not split and not documented and config.method != "qjl":
        idle(config, "bit_width_outlier", "n_outlier_channels and enable_outlier_two_stream=True")
    if not config.n_outlier_channels:
        idle(config, "n_calib_tokens", "n_outlier_channels")


def _standalone(config: KVCacheConfig) -> None:
    """Settings of the objects that are fed vector by vector."""
    flag(config, "enable_vectorized_attend")
    flag(config, "enable_fused_query_dot")
    # By name, since MLX is not imported here.
    named = not isinstance(config.dtype, str) and str(config.dtype) in FLOATS
    if config.dtype is not None and not named:
        raise refuse("dtype", config.dtype, f"None or one of {', '.join(FLOATS)}")
    seen = config.observers
    listed = isinstance(seen, list | tuple)
    if not listed or not all(callable(getattr(o, "on_event", None)) for o in seen):
        raise refuse("observers", seen, "a list of objects with a method on_event(event)")


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    "turboquant_rvq": check_turboquant_rvq,
    "turboquant_mse": check_turboquant_mse,
    "turboquant_prod": check_turboquant_prod,
    "qjl": check_qjl,
    "polar": check_polar,
    "spectral": check_spectral,
}
