"""Eviction by lot, and the bytes that are compared."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from veloxquant.benchmarks.rivals import RandomRows, held_bytes
from veloxquant.cache.builder import build_layer
from veloxquant.cache.table import held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape

SHAPE = LayerShape(4, 2, 32, 32, 2)


def feed(cache, tokens: int, chunk: int = 64) -> None:
    for start in range(0, tokens, chunk):
        n = min(chunk, tokens - start)
        # each row carries its position, so that survivors can be told
        rows = mx.broadcast_to(
            mx.arange(start, start + n, dtype=mx.float32)[None, None, :, None], (1, 2, n, 32)
        )
        cache.update_and_fetch(rows, rows)


def survivors(cache) -> list[list[int]]:
    rows = cache.key_rows.decode(0, cache.key_rows.length, mx.float32)[0, :, :, 0]
    return [[int(x) for x in head] for head in rows.tolist()]


def test_the_lot_keeps_first_and_newest_rows_and_differs_by_head() -> None:
    cache = RandomRows(SHAPE, 48, 4, 8, "prompt", seed=1)
    feed(cache, 256)
    assert cache.rows == 256
    feed(cache, 1)
    cache.commit()
    first, second = survivors(cache)
    assert first != second
    for head in (first, second):
        assert len(head) == 48
        assert head[:-1] == sorted(set(head[:-1]))
        assert head[:4] == [0, 1, 2, 3]
        assert head[-8:] == [*range(249, 256), 0]


def test_the_lot_holds_the_budget_after_every_step() -> None:
    cache = RandomRows(SHAPE, 48, 4, 1, "always", seed=1)
    feed(cache, 200)
    for _ in range(5):
        feed(cache, 1)
        cache.commit()
        assert cache.rows == 48
    assert cache.offset == 205


@pytest.mark.parametrize(("method", "bits"), [("kivi", 4), ("kivi", 2), ("turboquant_rvq", 3)])
def test_bytes_of_an_fp32_run_are_those_planned_for_16_bits(method: str, bits: int) -> None:
    config = KVCacheConfig(method=method, bit_width_inlier=bits)
    cache = build_layer(config, SHAPE)
    feed(cache, 320)
    assert held_bytes(cache) == held(config, SHAPE, 320).nbytes


def test_bytes_of_the_rivals_are_counted_alike() -> None:
    plain, packed = KVCache(), QuantizedKVCache(group_size=32, bits=4)
    for cache in (plain, packed):
        feed(cache, 256)
    assert held_bytes(plain) == 2 * 2 * 256 * 32 * 2
    assert held_bytes(packed) == 2 * 2 * 256 * (32 * 4 // 8 + 2 * 2)
