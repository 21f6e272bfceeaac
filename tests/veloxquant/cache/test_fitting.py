"""Rows and states that do not fit are refused before anything changes."""

import mlx.core as mx
import pytest

from veloxquant.cache.builder import build_layer
from veloxquant.cache.table import TABLE
from veloxquant.config.kv_cache import BASELINE, KVCacheConfig
from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers.sizes import LayerShape

SHAPE = LayerShape(2, 2, 64, 64, 4)
METHODS = [row.name for row in TABLE.values() if row.is_ready and row.name != BASELINE]


def filled(method, tokens=200, heads=2, batch=1, bits=2):
    cache = build_layer(KVCacheConfig(method=method, bit_width_inlier=bits), SHAPE)
    rows = mx.random.normal((batch, heads, tokens, 64), key=mx.random.key(tokens))
    cache.update_and_fetch(rows, rows)
    cache.commit()
    return cache


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (2, 2, 1, 64), (1, 2, 1, 32)])
def test_rows_of_another_shape_are_refused(method, shape):
    cache = filled(method)
    before = cache.offset
    with pytest.raises(ValueError, match="do not fit the ones held"):
        cache.update_and_fetch(mx.zeros(shape), mx.zeros(shape))
    assert cache.offset == before


@pytest.mark.parametrize("method", METHODS)
def test_damaged_counters_and_arrays_are_refused_and_change_nothing(method):
    good = filled(method).compact_state()
    for damage in ("negative", "long", "short", "type", "offset", "tree"):
        state = [*good[:5], [[*s[:3], dict(s[3])] for s in good[5]], good[6]]
        at = next(i for i, s in enumerate(state[5]) if s[1])
        store = state[5][at]
        name = next(iter(store[3]))
        if damage == "negative":
            store[0] = -64
        elif damage == "long":
            store[1] = store[2] = 4000 * store[1]
        elif damage == "short":
            store[3][name] = store[3][name][..., :1]
        elif damage == "type":
            store[3][name] = store[3][name].astype(mx.int8)
        elif damage == "offset":
            state[2] = 3
        else:
            state = [None]
        target = filled(method, tokens=64)
        held = target.nbytes
        with pytest.raises(CacheStateError):
            target.state = state
        assert (target.offset, target.nbytes) == (64, held), damage


@pytest.mark.parametrize("method", ["kivi", "turboquant_rvq"])
def test_a_state_of_other_bits_is_refused(method):
    with pytest.raises(CacheStateError, match="should be"):
        filled(method).state = filled(method, bits=4).state
