"""Settings every test needs before anything else is imported."""

import ctypes
import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if sys.platform == "linux":
    # The BLAS bundled in MLX's Linux wheel is a reference one, 20 to 50 times slower.
    for name in ("libopenblas.so.0", "libopenblas.so"):
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            break
        except OSError:
            continue
