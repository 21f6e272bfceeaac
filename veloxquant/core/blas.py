"""The BLAS that must be loaded before MLX on Linux; imports nothing of MLX itself."""

import ctypes
import sys

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
