"""`KVCacheConfig`: one flat configuration object for every method.

The documents give it about 220 flat fields. Those of one method are inherited from that method's
options class, so that names and defaults stand once, in `config/options.py`.
"""

import copy
import dataclasses
import functools
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from veloxquant.config import options as method_options
from veloxquant.config.field_names import naming_unknown_fields
from veloxquant.config.method_names import BASELINE as BASELINE
from veloxquant.config.method_names import METHOD_NAMES as METHOD_NAMES
from veloxquant.config.method_names import MethodName as MethodName
from veloxquant.config.options import (
    A2ATSOptions,
    AdaKVOptions,
    AgeTieredKVOptions,
    AMCOptions,
    AnchorKVOptions,
    CacheGenOptions,
    CaMOptions,
    ChunkKVOptions,
    CurDKVOptions,
    GEAROptions,
    H2OOptions,
    KeyformerOptions,
    KittyOptions,
    KIVIOptions,
    KVQuantOptions,
    KVTCOptions,
    KVzipOptions,
    L2NormOptions,
    MiniCacheOptions,
    MorphKVOptions,
    NestedKVOptions,
    NSNQuantOptions,
    PALUOptions,
    PyramidKVOptions,
    QFiltersOptions,
    RocketKVOptions,
    SKVQOptions,
    SnapKVOptions,
    SpectralQuantOptions,
    SqueezeAttentionOptions,
    StreamingLLMOptions,
    SVDqOptions,
    TOVAOptions,
    VecInferOptions,
    XKVOptions,
    XQuantOptions,
    ZipCacheOptions,
)
from veloxquant.core.exceptions import QuantizerConfigError

EvictionStorage = Literal[
    "exact", "affine8", "affine4", "affine2", "turboquant4", "turboquant3", "turboquant2"
]
EVICTION_STORAGE: tuple[str, ...] = get_args(EvictionStorage)
"""Forms of kept rows: as they came, or so many bits a channel in affine groups or rotated."""
STANDALONE_METHODS = frozenset({"polar", "qjl", "spectral", "turboquant_mse", "turboquant_prod"})


@dataclass
class CommonOptions:
    """Fields that are not tied to one method."""

    method: str = "turboquant_rvq"
    head_dim: int = 128
    bit_width_inlier: int | list[int] = 2
    bit_width_outlier: int | None = None
    jl_dim: int | None = None
    n_outlier_channels: int | None = None
    n_calib_tokens: int | None = None
    enable_vectorized_attend: bool = True
    enable_outlier_two_stream: bool = False
    enable_fused_query_dot: bool = False
    seed: int = 42
    dtype: Any = None
    capacity: int | None = None
    sliding_window: int | None = None
    store: Any = None
    observers: list[Any] = field(default_factory=list)
    options: object | None = None


@dataclass
class CalibrationFields:
    """Fields that carry calibration arrays or belong to a wrapper of another method."""

    n_sink_tokens: int = 5
    smooth_factors: Any = None
    key_codebook: Any = None
    value_codebook: Any = None


@naming_unknown_fields
@dataclass
class KVCacheConfig(
    SpectralQuantOptions,
    CalibrationFields,
    AgeTieredKVOptions,
    RocketKVOptions,
    AnchorKVOptions,
    A2ATSOptions,
    AMCOptions,
    NestedKVOptions,
    CurDKVOptions,
    KVTCOptions,
    KVzipOptions,
    MorphKVOptions,
    KeyformerOptions,
    QFiltersOptions,
    SKVQOptions,
    L2NormOptions,
    NSNQuantOptions,
    XKVOptions,
    CaMOptions,
    ChunkKVOptions,
    SqueezeAttentionOptions,
    PyramidKVOptions,
    TOVAOptions,
    H2OOptions,
    StreamingLLMOptions,
    SnapKVOptions,
    ZipCacheOptions,
    GEAROptions,
    MiniCacheOptions,
    CacheGenOptions,
    PALUOptions,
    KVQuantOptions,
    XQuantOptions,
    AdaKVOptions,
    KittyOptions,
    SVDqOptions,
    KIVIOptions,
    VecInferOptions,
    CommonOptions,
):
    """Configuration of the caches of one model or layer.

    `method` is one of `METHOD_NAMES`, or `"fp16"` for the uncompressed baseline. Values of
    `options` fill the flat fields that are still at their default; an explicit flat argument wins.

    Note:
        A flat method field set directly works but warns (`DeprecationWarning`) with its
        replacement. `residual_length` is shared by kivi and vecinfer, so it never warns.
        Values are checked when a cache is built, by `config.validate.check`.

    Raises:
        QuantizerConfigError: for a field that does not exist, with the nearest ones.
    """

    use_metal_kernels: bool | None = None
    fused_sdpa: bool | None = False
    fused_sdpa_max_ctx: int | None = None
    fused_sdpa_memory_bound: bool = False
    eviction_storage: EvictionStorage = "exact"
    """Form of the rows that an evicting method keeps; ours."""

    def __post_init__(self) -> None:
        """Warn about flat method fields, then let `options` fill what is at its default."""
        for name in explicit_method_fields(self):
            if name in SHARED_FIELDS:
                continue
            owner = FIELD_OWNER[name]
            warnings.warn(
                f"{name}={getattr(self, name)!r} is set as a flat field; "
                f"use options={owner}({name}=...) instead",
                DeprecationWarning,
                stacklevel=4,  # past the generated constructor and the one that checks names
            )
        if self.options is not None:
            if isinstance(self.options, type) or not dataclasses.is_dataclass(self.options):
                raise QuantizerConfigError(
                    f"options={self.options!r} is not possible; options must be an object of a "
                    f"method's options class, such as SnapKVOptions(snap_budget=512)"
                )
            usual = defaults()
            for option in dataclasses.fields(self.options):  # type: ignore[arg-type]
                if option.name in usual and _untouched(self, option.name, usual):
                    setattr(self, option.name, getattr(self.options, option.name))

    def with_fields(self, **changes: Any) -> "KVCacheConfig":
        """Copy with some fields replaced, without warnings; arrays and lists are shared."""
        clone = copy.copy(self)
        for name, value in changes.items():
            if name not in defaults():
                raise AttributeError(f"KVCacheConfig has no field {name!r}")
            setattr(clone, name, value)
        return clone


@functools.cache
def defaults() -> Mapping[str, Any]:
    """Default of every field of `KVCacheConfig`, in field order, to compare with."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(KVCacheConfig):
        is_plain = f.default is not dataclasses.MISSING
        out[f.name] = f.default if is_plain else f.default_factory()  # type: ignore[misc]
    return types.MappingProxyType(out)


def _untouched(config: KVCacheConfig, name: str, usual: Mapping[str, Any]) -> bool:
    value, default = getattr(config, name), usual[name]
    return value is default or (type(value) is type(default) and value == default)


# Field name -> name of the options class that declares it.
FIELD_OWNER: dict[str, str] = {
    f.name: cls.__name__
    for cls in vars(method_options).values()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls)
    for f in dataclasses.fields(cls)
}
SHARED_FIELDS = frozenset({"residual_length"})


def explicit_method_fields(config: KVCacheConfig) -> list[str]:
    """Names of method fields that differ from their default, in field order."""
    usual = defaults()
    return [name for name in FIELD_OWNER if not _untouched(config, name, usual)]
