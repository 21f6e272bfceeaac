"""Range coding: lossless, as small as the entropy says, damage is noticed."""

import numpy as np
import pytest

from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers import rans

DRAW = np.random.default_rng(0)


def streams(n: int, lanes: int) -> dict[str, np.ndarray]:
    return {
        "normal": np.clip(np.round(DRAW.normal(8, 2, (n, lanes))), 0, 15).astype(np.int64),
        "constant": np.full((n, lanes), 3),
        "two": DRAW.integers(0, 2, (n, lanes)),
        "bytes": DRAW.integers(0, 256, (n, lanes)),
        "skewed": (DRAW.random((n, lanes)) < 0.002).astype(np.int64),
    }


def coded(symbols: np.ndarray) -> tuple[rans.Coded, np.ndarray, np.ndarray]:
    tables = rans.frequencies(np.bincount(symbols.ravel())[None])
    which = np.zeros(symbols.shape, dtype=np.uint8)
    return rans.encode(symbols, tables, which), tables, which


@pytest.mark.parametrize("name", streams(1, 1))
@pytest.mark.parametrize(("n", "lanes"), [(1, 1), (4_096, 1), (700, 9)])
def test_round_trip_and_size(name: str, n: int, lanes: int) -> None:
    symbols = streams(n, lanes)[name]
    result, tables, which = coded(symbols)
    np.testing.assert_array_equal(rans.decode(result, tables, which), symbols)
    share = np.bincount(symbols.ravel()) / symbols.size
    entropy = -(share * np.log2(np.where(share > 0, share, 1))).sum() * symbols.size / 8
    size = result.states.nbytes + result.words.nbytes
    assert size <= 1.005 * entropy + 6 * lanes + 8
    if n * lanes >= 4_096 and name not in ("constant", "skewed"):
        assert size == pytest.approx(entropy, rel=0.02, abs=6 * lanes + 8)


def test_frequencies_sum_up_and_keep_rare_symbols() -> None:
    counts = np.array([[10**9, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    tables = rans.frequencies(counts)
    assert (tables.sum(axis=1) == 1 << rans.PRECISION).all()
    assert (tables[0] > 0).tolist() == [True, True, True, False]
    many = rans.frequencies(np.concatenate([[10**6], np.ones(511, int)])[None])
    assert many.sum() == 1 << rans.PRECISION
    assert many.min() == 1


def test_several_tables() -> None:
    symbols = DRAW.integers(0, 5, (300, 4))
    which = DRAW.integers(0, 2, (300, 4))
    counts = np.stack([np.bincount(symbols[which == t], minlength=5) for t in range(2)])
    tables = rans.frequencies(counts)
    result = rans.encode(symbols, tables, which)
    np.testing.assert_array_equal(rans.decode(result, tables, which), symbols)


def test_damage_is_noticed() -> None:
    symbols = streams(500, 2)["normal"]
    (states, words), tables, which = coded(symbols)
    for states_, words_ in (
        (states, words[:-1]),
        (states, np.append(words, 7)),
        (states ^ 5, words),
    ):
        with pytest.raises(CacheStateError, match="coded symbols"):
            rans.decode(rans.Coded(states_, words_), tables, which)
    with pytest.raises(CacheStateError, match="must sum"):
        rans.decode(rans.Coded(states, words), tables * 2, which)
