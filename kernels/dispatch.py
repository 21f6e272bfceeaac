"""The one decision: which implementation serves an attention step over packed tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import mlx.core as mx

from veloxquant.kernels import native

Route = Literal["reference", "native"]

NATIVE_ROWS = 32
"""Query rows of one KV head up to which the compiled kernel beats decoding tiles for a GEMM."""
NATIVE_DECODE_TOKENS = 128
"""Tokens from which unpacking through the compiled kernel pays for its synchronisation."""
THREAD_WORK = 1 << 20
"""Elements read from which a second thread pays for its start (about 20 µs)."""


def route(*, rows: int, dim: int, mask: object, use_kernels: bool | None = None) -> Route:
    """Where to compute a step of `rows` query rows for each KV head.

    Args:
        rows: query rows of one KV head, repeats times length.
        dim: larger of the key and value head size.
        mask: arrays that differ by head go to the reference.
        use_kernels: False keeps to array operations, None decides by itself.
    """
    if use_kernels is False or mx.default_device() != mx.cpu:
        return "reference"
    if rows > NATIVE_ROWS or dim > native.MAX_DIM - 32:
        return "reference"
    if isinstance(mask, mx.array) and (
        mask.ndim not in (2, 4) or (mask.ndim == 4 and mask.shape[1] > 1)
    ):
        return "reference"
    return "native" if native.library() is not None else "reference"


_arrays_only: ContextVar[bool] = ContextVar("arrays_only", default=False)


@contextmanager
def arrays_only(on: bool) -> Iterator[None]:
    """Keep unpacking to array operations within, if `on`."""
    token = _arrays_only.set(on or _arrays_only.get())
    try:
        yield
    finally:
        _arrays_only.reset(token)


def decodes_natively(tokens: int) -> bool:
    """Whether `tokens` tokens are unpacked by the compiled kernel: whole tiles, not a few rows."""
    return (
        tokens >= NATIVE_DECODE_TOKENS
        and not _arrays_only.get()
        and mx.default_device() == mx.cpu
        and native.library() is not None
    )


def threads(elements: int) -> int:
    """Threads for a step that reads `elements` keys and values."""
    return 1 if elements < THREAD_WORK else min(2, os.cpu_count() or 1)


def status() -> str:
    """One sentence for `vq doctor`."""
    if mx.default_device() != mx.cpu:
        return "GPU backend: MLX's own kernels"
    if native.library() is not None:
        return "compiled CPU kernel loaded"
    return "compiled CPU kernel missing: decoding is slower; install a C compiler and reinstall"
