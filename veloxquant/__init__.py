"""Run long conversations with local language models on your own machine.

The names below load on first use, so that importing the package costs nothing and needs no MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veloxquant.cache.builder import KVCacheBuilder, KVCacheFactory
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
    from veloxquant.observers import KeyNormObserver, KeyNormReport
    from veloxquant.quantizers.factory import QuantizerFactory

__version__ = "0.1.0"

_EXCEPTIONS = "veloxquant.core.exceptions"
_HOME = {
    "KVCacheConfig": "veloxquant.config.kv_cache",
    "ArtifactStore": "veloxquant.core.abstractions",
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
    "BlockPoolAllocator",
    "BlockPoolExhaustedError",
    "CacheStateError",
    "CodebookDimensionMismatch",
    "CyclicPipelineError",
    "EncodedVector",
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
