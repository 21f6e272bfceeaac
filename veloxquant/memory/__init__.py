"""Memory of KV caches in fixed-size blocks, shared by all requests.

The pool is plain Python. The classes that hold arrays load MLX when they are first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from veloxquant.memory.block_pool import AllocationStats, Block, BlockPoolAllocator, PoolConfig
from veloxquant.memory.lease import Lease, Promises
from veloxquant.memory.pooled_cache import PooledKVCache

if TYPE_CHECKING:
    from veloxquant.memory.cells import run_length_cells
    from veloxquant.memory.mlx_storage import MLXBlockStorage
    from veloxquant.memory.pool_backed_cache import PoolBackedKVCache, build_pooled_caches

__all__ = [
    "AllocationStats",
    "Block",
    "BlockPoolAllocator",
    "Lease",
    "MLXBlockStorage",
    "PoolBackedKVCache",
    "PoolConfig",
    "PooledKVCache",
    "Promises",
    "build_pooled_caches",
    "run_length_cells",
]

_LATER = {
    "MLXBlockStorage": "mlx_storage",
    "PoolBackedKVCache": "pool_backed_cache",
    "build_pooled_caches": "pool_backed_cache",
    "run_length_cells": "cells",
}


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
