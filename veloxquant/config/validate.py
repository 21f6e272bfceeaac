"""Legal ranges of the configuration, method by method, checked when a cache is built.

Every refusal names the field, the value and what is legal.
"""

from collections.abc import Callable, Iterable
from typing import Any

from veloxquant.config.kv_cache import (
    BASELINE,
    FIELD_OWNER,
    METHOD_NAMES,
    SHARED_FIELDS,
    KVCacheConfig,
    explicit_method_fields,
)
from veloxquant.core.exceptions import QuantizerConfigError

AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
CODEBOOK_BITS = (1, 2, 3, 4, 5, 6)


def refuse(field: str, value: Any, legal: str) -> QuantizerConfigError:
    """The error for one field out of its range."""
    return QuantizerConfigError(f"{field}={value!r} is not possible; {field} must be {legal}")


def one_of(config: KVCacheConfig, field: str, legal: Iterable[Any]) -> None:
    """Raise unless the field holds one of `legal`; neither True nor 1.0 is 1 here."""
    value, legal = getattr(config, field), tuple(legal)
    if not isinstance(value, int | str) or isinstance(value, bool) or value not in legal:
        raise refuse(field, value, "one of " + ", ".join(map(str, legal)))


def integer(config: KVCacheConfig, field: str, low: int, high: int | None = None) -> int:
    """The field's value, an int within [low, high]; raise otherwise."""
    value = getattr(config, field)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        bound = f"an integer of at least {low}" + ("" if high is None else f" and at most {high}")
        raise refuse(field, value, bound)
    return value


def bits(config: KVCacheConfig, legal: tuple[int, ...]) -> None:
    """Check `bit_width_inlier`, an int or one int a layer."""
    value = config.bit_width_inlier
    widths = value if isinstance(value, list) else [value]
    if not widths:
        raise refuse("bit_width_inlier", value, "an integer or a list with one integer a layer")
    for width in widths:
        if not isinstance(width, int) or isinstance(width, bool) or width not in legal:
            raise refuse("bit_width_inlier", width, "one of " + ", ".join(map(str, legal)))


def unused(config: KVCacheConfig, fields: Iterable[str]) -> None:
    """Raise when a common field is set that this method would ignore."""
    defaults = KVCacheConfig()
    for field in fields:
        if getattr(config, field) != getattr(defaults, field):
            raise QuantizerConfigError(
                f"{field}={getattr(config, field)!r} has no effect on method {config.method!r}; "
                f"leave it unset"
            )


NO_OUTLIERS = (
    "bit_width_outlier",
    "jl_dim",
    "n_outlier_channels",
    "n_calib_tokens",
    "enable_outlier_two_stream",
    "enable_fused_query_dot",
    "observers",
)


def check_fp16(config: KVCacheConfig) -> None:
    """The baseline takes no setting of a codec."""
    unused(config, NO_OUTLIERS)


def check_turboquant_rvq(config: KVCacheConfig) -> None:
    """Total bits 1 to 6; outlier settings belong to the standalone methods."""
    bits(config, CODEBOOK_BITS)
    unused(config, NO_OUTLIERS)


def check_kivi(config: KVCacheConfig) -> None:
    """Affine bits, an MLX group size, a residual of whole groups."""
    bits(config, AFFINE_BITS)
    one_of(config, "kivi_group_size", AFFINE_GROUPS)
    residual = integer(config, "residual_length", 1)
    if residual % config.kivi_group_size:
        raise refuse(
            "residual_length", residual, f"a multiple of kivi_group_size={config.kivi_group_size}"
        )
    unused(config, NO_OUTLIERS)


def check_kivi_sink(config: KVCacheConfig) -> None:
    """As kivi, with a number of sink tokens."""
    check_kivi(config)
    integer(config, "n_sink_tokens", 0)


def check_streaming_llm(config: KVCacheConfig) -> None:
    """Sinks may be none; the window holds at least one token."""
    integer(config, "stream_n_sink", 0)
    integer(config, "stream_window_size", 1)
    unused(config, NO_OUTLIERS)


def check_snapkv(config: KVCacheConfig) -> None:
    """The budget must leave room beside sinks and observation window."""
    sink = integer(config, "snap_n_sink", 0)
    window = integer(config, "snap_obs_window", 1)
    budget = integer(config, "snap_budget", 1)
    if budget <= sink + window:
        raise refuse(
            "snap_budget", budget, f"more than snap_n_sink + snap_obs_window = {sink + window}"
        )
    one_of(config, "snap_dtype", ("auto", "float32", "float16", "bfloat16"))
    one_of(config, "snap_backend", ("auto", "reference", "metal"))
    unused(config, NO_OUTLIERS)


CHECKS: dict[str, Callable[[KVCacheConfig], None]] = {
    BASELINE: check_fp16,
    "turboquant_rvq": check_turboquant_rvq,
    "kivi": check_kivi,
    "kivi_sink": check_kivi_sink,
    "streaming_llm": check_streaming_llm,
    "snapkv": check_snapkv,
}


def check(config: KVCacheConfig, options: type | None = None) -> None:
    """Raise when the configuration cannot work; `options` is the method's options class.

    Raises:
        QuantizerConfigError: naming the field, its value and the legal range.
    """
    if config.method not in METHOD_NAMES and config.method != BASELINE:
        raise QuantizerConfigError(
            f"unknown method {config.method!r}; known methods: {', '.join(METHOD_NAMES)}"
        )
    integer(config, "head_dim", 1, 1024)
    if config.capacity is not None:
        integer(config, "capacity", 1)
    given = config.options
    if given is not None and options is not None and not isinstance(given, options):
        raise QuantizerConfigError(
            f"options={type(given).__name__} belongs to another method; "
            f"method {config.method!r} takes {options.__name__}"
        )
    for field in explicit_method_fields(config):
        foreign = options is None or FIELD_OWNER[field] != options.__name__
        if foreign and field not in SHARED_FIELDS:
            raise QuantizerConfigError(
                f"{field}={getattr(config, field)!r} is an option of {FIELD_OWNER[field]}; "
                f"method {config.method!r} would ignore it"
            )
    if rule := CHECKS.get(config.method):
        rule(config)
