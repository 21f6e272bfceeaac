"""Digests of constants that give saved codes their meaning and are no part of a saved cache.

Codebooks, smooth factors and rotations come from the configuration, from a calibration of the model
or from a file of their own. A saved cache names them by SHA-256 of values, shape and type, so that
codes are never read with others.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np


def array_digest(value: Any) -> str:
    """SHA-256 of an array of MLX or numpy, or of a list that makes one."""
    if isinstance(value, mx.array):
        shape, dtype = value.shape, str(value.dtype).removeprefix("mlx.core.")
        raw = np.asarray(mx.contiguous(value).reshape(-1).view(mx.uint8)).tobytes()
    else:
        a = np.ascontiguousarray(value)
        shape, dtype, raw = a.shape, str(a.dtype), a.tobytes()
    return hashlib.sha256(f"{dtype} {tuple(shape)} ".encode() + raw).hexdigest()


def constants_of(caches: Iterable[Any]) -> list[str]:
    """A digest for each cache of ours, in order; empty where everything is in its state.

    Arrays that layers share are read once.
    """
    known: dict[int, str] = {}

    def digest(a: mx.array) -> str:
        if id(a) not in known:
            known[id(a)] = array_digest(a)
        return known[id(a)]

    out: list[str] = []
    for cache in caches:
        if (inner := getattr(cache, "caches", None)) is not None:
            out += constants_of(inner)
        elif (layout := getattr(cache, "layout", None)) is not None:
            found = [digest(a) for store in layout() for a in store.codec.foreign]
            out.append(hashlib.sha256(" ".join(found).encode()).hexdigest() if found else "")
    return out
