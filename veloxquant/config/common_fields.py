"""Which method reads which common field: the one table that checks, settings and tests go by.

A common field belongs to no options class. Methods that are not named for a field would ignore it,
so a value other than its default is refused there. `use_metal_kernels` is not here: every cache
reads it.
"""

from collections.abc import Mapping
from typing import Any

from veloxquant.config.kv_cache import STANDALONE_METHODS, KVCacheConfig, defaults
from veloxquant.core.exceptions import QuantizerConfigError

_CODED = frozenset({"turboquant_mse", "turboquant_prod"})
_LOUD = _CODED | {"qjl"}
_KIVI = frozenset({"kivi", "kivi_sink"})
_VECINFER = frozenset({"vecinfer"})
_OBJECTS = STANDALONE_METHODS
_FITTED = frozenset({"vecinfer", "spectral", "kvquant", "skvq", "qfilters", "kvtc", "amc", "a2ats"})
_EVICTING = frozenset(
    {
        "snapkv", "streaming_llm", "h2o", "tova", "pyramidkv", "squeeze", "chunkkv", "cam", "knorm",
        "qfilters", "keyformer", "morphkv", "kvzip", "curdkv", "nestedkv", "rocketkv",
    }
)  # fmt: skip
_NONE: frozenset[str] = frozenset()

READERS: Mapping[str, frozenset[str]] = {
    "bit_width_inlier": STANDALONE_METHODS | _KIVI | {"turboquant_rvq"},
    "bit_width_outlier": _CODED,
    "jl_dim": frozenset({"qjl", "turboquant_prod"}),
    "n_outlier_channels": _LOUD,
    "n_calib_tokens": _LOUD,
    "enable_outlier_two_stream": _LOUD,
    "enable_vectorized_attend": _OBJECTS,
    "enable_fused_query_dot": _OBJECTS,
    "dtype": _OBJECTS,
    "capacity": _OBJECTS,
    "sliding_window": _OBJECTS,
    "observers": _OBJECTS,
    "seed": STANDALONE_METHODS | _VECINFER | {"turboquant_rvq", "a2ats", "cam"},
    "store": STANDALONE_METHODS | _FITTED,
    "residual_length": _KIVI | _VECINFER | {"kitty"},
    "n_sink_tokens": frozenset({"kivi_sink"}),
    "smooth_factors": _VECINFER,
    "key_codebook": _VECINFER,
    "value_codebook": _VECINFER,
    "eviction_storage": _EVICTING,
    "fused_sdpa": _NONE,
    "fused_sdpa_max_ctx": _NONE,
    "fused_sdpa_memory_bound": _NONE,
}
"""Methods by common field. The seed of vecinfer and a2ats is that of a calibration's codebooks."""

HINTS: Mapping[str, str] = {
    "capacity": "; a serving cache grows with its tokens, and the pool of the server limits them",
    "sliding_window": "; method 'streaming_llm' keeps first tokens and a window",
    "n_sink_tokens": "; method 'kivi_sink' keeps first tokens exact",
    "eviction_storage": "; only methods that give up tokens keep the others in a form of choice",
    **dict.fromkeys(
        ("fused_sdpa", "fused_sdpa_max_ctx", "fused_sdpa_memory_bound"),
        "; attention reads the packed codes always, and use_metal_kernels=False turns kernels off",
    ),
}
"""What to do instead of setting a field that a method would ignore."""


def reads(config: KVCacheConfig, field: str) -> bool:
    """Whether the method of a configuration reads a common field."""
    if field == "seed" and config.eviction_storage.startswith("turboquant"):
        return True
    return config.method in READERS[field]


def refuse_unread(config: KVCacheConfig) -> None:
    """Raise when a common field is set that the method would ignore.

    Raises:
        QuantizerConfigError: naming the field, its value and the only legal one.
    """
    usual = defaults()
    for field in READERS:
        value = getattr(config, field)
        if not _same(value, usual[field]) and not reads(config, field):
            raise QuantizerConfigError(
                f"{field}={value!r} has no effect on method {config.method!r}; leave it unset, "
                f"or {usual[field]!r}{HINTS.get(field, '')}"
            )


def _same(value: Any, default: Any) -> bool:
    """Whether a value is the default; neither arrays nor True and 1 are taken for it."""
    if value is default:
        return True
    return isinstance(value, int | float | str | list) and (
        isinstance(value, bool) == isinstance(default, bool) and bool(value == default)
    )
