"""Run long conversations with local language models on your own machine.

The names below load on first use, so that importing the package costs nothing and needs no MLX.
Documented import paths whose code lives elsewhere are in `veloxquant.documented`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from veloxquant import documented as _documented

if TYPE_CHECKING:
    from veloxquant.allocators.ratequant import (
        allocate_bits_ratequant,
        calibrate_layer_sensitivities,
        fit_distortion_curve,
    )
    from veloxquant.allocators.vecinfer import (
        apply_dual_transform_keys,
        apply_dual_transform_queries,
        calibrate_smooth_factors,
        train_codebook,
        walsh_hadamard_matrix,
    )
    from veloxquant.cache.builder import KVCacheBuilder, KVCacheFactory
    from veloxquant.config.auto_config import (
        AutoConfigResult,
        HardwareInfo,
        WorkloadSpec,
        detect_hardware_info,
        select_kv_cache_config,
    )
    from veloxquant.config.kv_cache import KVCacheConfig
    from veloxquant.core.abstractions import ArtifactStore, KVCache, QuantizationObserver, Quantizer
    from veloxquant.core.context import EncodedVector, QuantizationContext, TransformResult
    from veloxquant.core.exceptions import (
        ArtifactNotFoundError,
        BlockPoolExhaustedError,
        CacheStateError,
        CodebookDimensionMismatch,
        CyclicPipelineError,
        OwnerAlreadyActiveError,
        QuantizerConfigError,
    )
    from veloxquant.memory.block import PoolConfig
    from veloxquant.memory.block_pool import BlockPoolAllocator
    from veloxquant.memory.pooled_cache import PooledKVCache
    from veloxquant.methods.vecinfer import VecInferKVCache
    from veloxquant.observers import KeyNormObserver, KeyNormReport
    from veloxquant.quantizers.factory import QuantizerFactory

__version__ = "0.1.0"

_documented.install()

_EXCEPTIONS = "veloxquant.core.exceptions"
_AUTO = "veloxquant.config.auto_config"
_RATEQUANT = "veloxquant.allocators.ratequant"
_VECINFER = "veloxquant.allocators.vecinfer"
_HOME = {
    "KVCacheConfig": "veloxquant.config.kv_cache",
    "ArtifactStore": "veloxquant.core.abstractions",
    "AutoConfigResult": _AUTO,
    "HardwareInfo": _AUTO,
    "WorkloadSpec": _AUTO,
    "detect_hardware_info": _AUTO,
    "select_kv_cache_config": _AUTO,
    "BlockPoolAllocator": "veloxquant.memory.block_pool",
    "EncodedVector": "veloxquant.core.context",
    "KVCache": "veloxquant.core.abstractions",
    "KVCacheBuilder": "veloxquant.cache.builder",
    "KVCacheFactory": "veloxquant.cache.builder",
    "KeyNormObserver": "veloxquant.observers",
    "KeyNormReport": "veloxquant.observers",
    "PoolConfig": "veloxquant.memory.block",
    "PooledKVCache": "veloxquant.memory.pooled_cache",
    "QuantizationContext": "veloxquant.core.context",
    "QuantizationObserver": "veloxquant.core.abstractions",
    "Quantizer": "veloxquant.core.abstractions",
    "QuantizerFactory": "veloxquant.quantizers.factory",
    "TransformResult": "veloxquant.core.context",
    "VecInferKVCache": "veloxquant.methods.vecinfer",
    "allocate_bits_ratequant": _RATEQUANT,
    "calibrate_layer_sensitivities": _RATEQUANT,
    "fit_distortion_curve": _RATEQUANT,
    "apply_dual_transform_keys": _VECINFER,
    "apply_dual_transform_queries": _VECINFER,
    "calibrate_smooth_factors": _VECINFER,
    "train_codebook": _VECINFER,
    "walsh_hadamard_matrix": _VECINFER,
    "ArtifactNotFoundError": _EXCEPTIONS,
    "BlockPoolExhaustedError": _EXCEPTIONS,
    "CacheStateError": _EXCEPTIONS,
    "CodebookDimensionMismatch": _EXCEPTIONS,
    "CyclicPipelineError": _EXCEPTIONS,
    "OwnerAlreadyActiveError": _EXCEPTIONS,
    "QuantizerConfigError": _EXCEPTIONS,
}

__all__ = [
    "ArtifactNotFoundError",
    "ArtifactStore",
    "AutoConfigResult",
    "BlockPoolAllocator",
    "BlockPoolExhaustedError",
    "CacheStateError",
    "CodebookDimensionMismatch",
    "CyclicPipelineError",
    "EncodedVector",
    "HardwareInfo",
    "KVCache",
    "KVCacheBuilder",
    "KVCacheConfig",
    "KVCacheFactory",
    "KeyNormObserver",
    "KeyNormReport",
    "OwnerAlreadyActiveError",
    "PoolConfig",
    "PooledKVCache",
    "QuantizationContext",
    "QuantizationObserver",
    "Quantizer",
    "QuantizerConfigError",
    "QuantizerFactory",
    "TransformResult",
    "VecInferKVCache",
    "WorkloadSpec",
    "allocate_bits_ratequant",
    "apply_dual_transform_keys",
    "apply_dual_transform_queries",
    "calibrate_layer_sensitivities",
    "calibrate_smooth_factors",
    "detect_hardware_info",
    "fit_distortion_curve",
    "select_kv_cache_config",
    "train_codebook",
    "walsh_hadamard_matrix",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if home := _HOME.get(name):
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
