"""Facts about the machine's MLX backend, and the BLAS that must be loaded before it."""

import logging
import sys

import psutil

from veloxquant.core import blas

logger = logging.getLogger(__name__)

CPU_PREFILL_STEP = 256
GPU_PREFILL_STEP = 2048
RAM_SHARE = 0.75


def preload_openblas() -> bool:
    """Load OpenBLAS so that MLX's CPU backend calls it; must run before MLX is imported.

    The BLAS inside MLX's Linux wheel is a reference one, 20 to 50 times slower. Elsewhere there is
    nothing to do.
    """
    if sys.platform != "linux":
        return True
    if name := blas.preload_openblas():
        logger.info("Loaded %s for MLX's matrix products.", name)
        return True
    logger.warning(
        "OpenBLAS is missing: prompts are read about 20 times slower. "
        "Install it (Debian, Ubuntu: libopenblas0-pthread) and start again."
    )
    return False


def is_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    import mlx.core as mx

    return mx.default_device() == mx.Device(mx.cpu)


def default_limit() -> int:
    """Bytes this process may use unless told otherwise.

    On Apple silicon that is Metal's recommended working set, elsewhere 75 % of memory.
    """
    import mlx.core as mx

    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended and not is_cpu():
        return int(recommended)
    return int(RAM_SHARE * psutil.virtual_memory().total)
