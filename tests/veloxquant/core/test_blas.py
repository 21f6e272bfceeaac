"""OpenBLAS as MLX finds it."""

import ctypes
import os

import pytest

from veloxquant.core.blas import blas_on_all_cores, preload_openblas

LIBRARY = preload_openblas()


@pytest.mark.skipif(LIBRARY is None, reason="OpenBLAS is not installed, or not needed here")
def test_all_cores_within_and_as_before_afterwards() -> None:
    library = ctypes.CDLL(LIBRARY)
    library.openblas_set_num_threads(1)
    with blas_on_all_cores():
        assert library.openblas_get_num_threads() == os.cpu_count()
    assert library.openblas_get_num_threads() == 1
