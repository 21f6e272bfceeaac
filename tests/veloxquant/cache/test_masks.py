"""Masks that caches make: the word where it does, arrays by position, windows never ignored."""

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import (
    EVICTING,
    KEEPING,
    Ragged,
    feed,
    new_cache,
    random_tokens,
    shape_of,
    small_config,
)

from veloxquant.cache.table import MethodRow
from veloxquant.core.exceptions import CacheStateError

keeping = pytest.mark.parametrize("row", KEEPING, ids=lambda r: r.name)


def wanted(n: int, held: int, window: int | None) -> np.ndarray:
    queries = np.arange(held, held + n)[:, None]
    columns = np.arange(held + n)[None]
    seen = columns <= queries
    return seen if window is None else seen & (columns > queries - window)


@keeping
def test_masks_by_position(row: MethodRow) -> None:
    tokens = random_tokens(30)
    cache = new_cache(small_config(row), shape_of(tokens))
    feed(cache, tokens)
    assert cache.make_mask(1) is None
    assert cache.make_mask(4) == "causal"
    for n in (1, 4):
        for window in (None, 8, 1, 100):
            mask = cache.make_mask(n, return_array=True, window_size=window)
            if mask is None:
                assert n == 1
                assert wanted(n, 30, window).all()
            else:
                assert np.array_equal(np.array(mask), wanted(n, 30, window))
    narrow = cache.make_mask(1, window_size=8)
    assert np.array_equal(np.array(narrow), wanted(1, 30, 8)), "a window holds for one token, too"


@pytest.mark.parametrize("row", EVICTING, ids=lambda r: r.name)
def test_no_array_describes_evicted_tokens(row: MethodRow) -> None:
    tokens = random_tokens(61)
    cache = new_cache(small_config(row), shape_of(tokens))
    feed(cache, tokens.cut(0, 60))
    feed(cache, tokens.cut(60, 61))
    cache.commit()
    assert cache.make_mask(1) is None
    assert cache.make_mask(5) == "causal"
    with pytest.raises(CacheStateError, match=row.name):
        cache.make_mask(5, return_array=True)


@keeping
@pytest.mark.parametrize("window", [None, 7])
def test_rows_of_a_batch_hide_their_padding(row: MethodRow, window: int | None) -> None:
    ragged = Ragged(small_config(row), [random_tokens(12), random_tokens(5)], views=False)
    ragged.prompt(12)
    mask = np.array(ragged.batch.make_mask(3, window_size=window))
    assert mask.shape == (2, 1, 3, 15)
    assert np.array_equal(mask[0, 0], wanted(3, 12, window))
    assert not mask[1, 0, :, :7].any()
    assert np.array_equal(mask[1, 0, :, 7:], wanted(3, 5, window))


@keeping
def test_a_batch_refuses_what_it_cannot_do(row: MethodRow) -> None:
    ragged = Ragged(small_config(row), [random_tokens(12), random_tokens(5)])
    with pytest.raises(CacheStateError, match="pad them on the right"):
        ragged.batch.prepare(left_padding=[0, 7])
    three = random_tokens(1, batch=3)
    with pytest.raises(CacheStateError, match="3 rows were fed to a batch of 2"):
        ragged.batch.update_and_fetch(three.keys, three.values)
    ragged.prompt(12)
    assert ragged.batch.offset.dtype == mx.int32
    assert ragged.batch.trim(2) == 2
    assert ragged.batch.offset.tolist() == [10, 3]
