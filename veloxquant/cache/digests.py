"""Digests of what a saved cache needs, and checksums of what it holds.

Codebooks, smooth factors and rotations come from the configuration, from a calibration of the model
or from a file of their own. A saved cache names them by SHA-256 of values, shape and type, so that
codes are never read with others. What is in the file has CRC-32 checksums, which find every flipped
byte and cost a fraction of reading it; they are no protection against somebody who changes files.
"""

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np


def array_digest(value: Any) -> str:
    """SHA-256 of an array of MLX or numpy, or of a list that makes one."""
    if isinstance(value, mx.array):
        shape, dtype = value.shape, str(value.dtype).removeprefix("mlx.core.")
        raw = np.asarray(_bytes(value)).tobytes()
    else:
        a = np.ascontiguousarray(value)
        shape, dtype, raw = a.shape, str(a.dtype), a.tobytes()
    return hashlib.sha256(f"{dtype} {tuple(shape)} ".encode() + raw).hexdigest()


def checksums(arrays: Mapping[str, mx.array]) -> dict[str, str]:
    """CRC-32 of the type, shape and bytes of each array, as 8 hexadecimal digits."""
    flat = {name: _bytes(a) for name, a in arrays.items()}
    mx.eval(list(flat.values()))  # all at once: one by one costs as much as the sums
    return {
        name: f"{zlib.crc32(np.asarray(flat[name]).data, _sum(f'{a.dtype} {tuple(a.shape)} ')):08x}"
        for name, a in arrays.items()
    }


def _bytes(a: mx.array) -> mx.array:
    """The bytes of an array, the same memory where its rows lie in order."""
    return a.reshape(-1).view(mx.uint8)


def _sum(text: str) -> int:
    return zlib.crc32(text.encode())


def text_checksum(text: str) -> str:
    """CRC-32 of a text in UTF-8, as 8 hexadecimal digits."""
    return f"{_sum(text):08x}"


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
