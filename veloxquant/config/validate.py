"""The check of a configuration when a cache is built.

Every refusal names the field, the value and what is legal.
"""

from veloxquant.config.checks import CHECKS
from veloxquant.config.common_fields import reads, refuse_unread
from veloxquant.config.kv_cache import (
    BASELINE,
    EVICTION_STORAGE,
    FIELD_OWNER,
    METHOD_NAMES,
    SHARED_FIELDS,
    KVCacheConfig,
    explicit_method_fields,
)
from veloxquant.config.ranges import integer, one_of, refuse
from veloxquant.core.exceptions import QuantizerConfigError

MAX_SEED = (1 << 32) - 2


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
    one_of(config, "eviction_storage", EVICTION_STORAGE)
    if rule := CHECKS.get(config.method):
        rule(config)
    refuse_unread(config)
    _common_ranges(config)


def _common_ranges(config: KVCacheConfig) -> None:
    """Ranges of common fields that mean the same to every method that reads them."""
    if reads(config, "seed"):
        integer(config, "seed", 0, MAX_SEED)
    for field in ("capacity", "sliding_window"):
        if getattr(config, field) is not None:
            integer(config, field, 1)
    if not any(config.use_metal_kernels is v for v in (None, True, False)):
        raise refuse("use_metal_kernels", config.use_metal_kernels, "None, True or False")
