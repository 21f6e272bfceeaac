"""Coded data comes back exactly and is never larger than the data and a byte."""

import numpy as np
import pytest

from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers.entropy import HEADER_BYTES, deflate, inflate

NOISE = np.random.default_rng(0).integers(0, 1 << 32, 5_000, dtype=np.uint32)


@pytest.mark.parametrize(
    "data",
    [NOISE, NOISE % 3, np.zeros(999, np.uint32), NOISE[:0]],
    ids=["noise", "few", "0", "none"],
)
def test_round_trip(data: np.ndarray) -> None:
    packed = deflate(data)
    assert inflate(packed) == data.tobytes()
    assert len(packed) <= data.nbytes + HEADER_BYTES


def test_what_has_structure_gets_smaller() -> None:
    assert len(deflate(NOISE % 3)) < NOISE.nbytes / 8
    assert len(deflate(NOISE)) == NOISE.nbytes + HEADER_BYTES


@pytest.mark.parametrize("data", [b"", b"\7abc", b"\1abc"])
def test_damaged_data_is_refused(data: bytes) -> None:
    with pytest.raises(CacheStateError, match="coded data"):
        inflate(data)
