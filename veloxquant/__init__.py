"""Run long conversations with local language models on your own machine.

The names below load on first use, so that importing the package costs nothing and needs no MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veloxquant.config.kv_cache import KVCacheConfig
    from veloxquant.core.exceptions import (
        ArtifactNotFoundError,
        BlockPoolExhaustedError,
        CacheStateError,
        CodebookDimensionMismatch,
        CyclicPipelineError,
        OwnerAlreadyActiveError,
        QuantizerConfigError,
    )

__version__ = "0.1.0"

_EXCEPTIONS = "veloxquant.core.exceptions"
_HOME = {
    "KVCacheConfig": "veloxquant.config.kv_cache",
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
    "BlockPoolExhaustedError",
    "CacheStateError",
    "CodebookDimensionMismatch",
    "CyclicPipelineError",
    "KVCacheConfig",
    "OwnerAlreadyActiveError",
    "QuantizerConfigError",
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
