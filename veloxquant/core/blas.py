"""The BLAS that must be loaded before MLX on Linux; imports nothing of MLX itself."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_OPENBLAS = ("libopenblas.so.0", "libopenblas.so")


def preload_openblas() -> str | None:
    """Load OpenBLAS so that MLX's CPU backend calls it; must run before MLX is imported.

    The BLAS inside MLX's Linux wheel is a reference one, 20 to 50 times slower. Elsewhere there is
    nothing to do.

    Returns:
        The library that was loaded; None when none was found or none is needed.
    """
    if sys.platform != "linux":
        return None
    for name in _OPENBLAS:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return None


@contextmanager
def blas_on_all_cores() -> Iterator[None]:
    """Let a loaded OpenBLAS use every core within, whatever `OPENBLAS_NUM_THREADS` said."""
    try:
        library = (
            ctypes.CDLL(_OPENBLAS[0], mode=os.RTLD_NOLOAD) if sys.platform == "linux" else None
        )
    except OSError:
        library = None
    if library is None:
        yield
        return
    before = library.openblas_get_num_threads()
    library.openblas_set_num_threads(os.cpu_count() or 1)
    try:
        yield
    finally:
        library.openblas_set_num_threads(before)
