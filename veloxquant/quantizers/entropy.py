"""Lossless coding of packed words for files and transfers: DEFLATE, or as they are if smaller.

Coded data can be neither sliced by token nor planned, so caches never hold it.
Source: DEFLATE (RFC 1951), as KVTC (arXiv 2511.01815) uses it.
"""

import zlib

import numpy as np

from veloxquant.core.exceptions import CacheStateError

HEADER_BYTES = 1
_RAW, _DEFLATE = b"\0", b"\1"
_LEVEL = 6


def deflate(data: bytes | np.ndarray) -> bytes:
    """One byte that names the form, then the data, coded where that is smaller."""
    raw = np.ascontiguousarray(data).tobytes() if isinstance(data, np.ndarray) else data
    coded = zlib.compress(raw, _LEVEL)
    return _DEFLATE + coded if len(coded) < len(raw) else _RAW + raw


def inflate(data: bytes) -> bytes:
    """Inverse of `deflate`.

    Raises:
        CacheStateError: when the data is not what `deflate` gave.
    """
    form, body = data[:1], data[1:]
    if form == _RAW:
        return body
    if form != _DEFLATE:
        raise CacheStateError(f"coded data starts with {form!r}; it should be raw or DEFLATE")
    try:
        return zlib.decompress(body)
    except zlib.error as error:
        raise CacheStateError(f"coded data is damaged: {error}") from error
