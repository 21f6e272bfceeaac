import mlx.core as mx
import numpy as np
import pytest

from veloxquant.memory import BlockPoolAllocator, MLXBlockStorage, PoolConfig

BITS = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}
FLOATS = {"fp16": mx.float16, "bf16": mx.bfloat16, "fp32": mx.float32}


def make(head_dim=64, n_blocks=8, block_size=4):
    pool = BlockPoolAllocator(PoolConfig(block_size, n_blocks, separate_kv=False))
    return pool, MLXBlockStorage(pool, head_dim)


def codes(n, dim, bits, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << bits, (n, dim), dtype=np.uint8)


@pytest.mark.parametrize("dim", [1, 5, 64, 80, 127])
@pytest.mark.parametrize("format", BITS)
def test_codes_come_back_and_take_only_their_bits(format, dim):
    pool, storage = make(dim)
    (block,) = pool.allocate("kv", 3, 1, format)
    values = codes(3, dim, BITS[format])
    storage.write(block, 0, values[:2])
    storage.write(block, 2, mx.array(values[2:]))
    out = storage.read(block)
    assert out.dtype == mx.uint8
    np.testing.assert_array_equal(np.array(out), values)
    assert storage.resident_bytes() == 4 * -(-dim * BITS[format] // 8)


@pytest.mark.parametrize("format", FLOATS)
def test_float_formats_are_stored_as_they_are(format):
    pool, storage = make(8)
    (block,) = pool.allocate("kv", 4, 1, format)
    values = mx.random.normal((4, 8)).astype(FLOATS[format])
    storage.write(block, 0, values)
    out = storage.read(block)
    assert out.dtype == FLOATS[format]
    assert mx.array_equal(out, values)
    assert storage.resident_bytes() == values.nbytes


def test_packing_is_exactly_two_four_and_eight_codes_a_byte():
    sizes = {}
    for format in BITS:
        pool, storage = make(128, block_size=16)
        (block,) = pool.allocate("kv", 16, 1, format)
        storage.write(block, 0, np.zeros((16, 128), np.uint8))
        sizes[format] = storage.resident_bytes()
    assert sizes == {"int8": 2048, "int4": 1024, "int2": 512, "int1": 256}


def test_first_code_lies_in_the_lowest_bits():
    pool, storage = make(head_dim=3)
    (block,) = pool.allocate("kv", 4, 1, "int4")
    storage.write(block, 0, [[1, 2, 3]])
    assert storage.buffer_for(block)[0].tolist() == [0x21, 0x03]


def test_resident_bytes_are_what_mlx_holds():
    pool, storage = make(head_dim=4096, n_blocks=16, block_size=64)
    blocks = pool.allocate("kv", 64 * 16, 1, "int2")
    values = mx.zeros((64, 4096), mx.uint8)
    mx.eval(values)
    base = mx.get_active_memory()
    for block in blocks:
        storage.write(block, 0, values)
    assert storage.resident_bytes() == 16 * 64 * 1024
    assert mx.get_active_memory() - base == pytest.approx(storage.resident_bytes(), rel=0.05)


def test_read_returns_the_used_rows_only():
    pool, storage = make(2)
    (block,) = pool.allocate("kv", 4, 1, "fp32")
    storage.write(block, 1, [[1.0, 2.0]])
    pool.mark_used(block, 2)
    assert storage.read(block).tolist() == [[0, 0], [1, 2]]


def test_buffer_is_kept_on_reuse_and_remade_when_the_format_changes():
    pool, storage = make(8)
    (block,) = pool.allocate("kv", 4, 1, "int4")
    storage.write(block, 0, codes(4, 8, 4))
    first = storage.buffer_for(block)
    pool.free_all(1)
    (again,) = pool.allocate("kv", 4, 2, "int4")
    assert storage.buffer_for(again) is first
    pool.free_all(2)
    (other,) = pool.allocate("kv", 4, 3, "fp16")
    assert other.block_id == block.block_id
    storage.write(other, 0, mx.ones((4, 8)))
    assert storage.resident_bytes() == 4 * 8 * 2
    assert len(storage) == 1


def test_formats_live_side_by_side_in_one_pool():
    pool, storage = make(8)
    (a,) = pool.allocate("kv", 4, 1, "int2")
    (b,) = pool.allocate("kv", 4, 2, "fp16")
    storage.write(a, 0, codes(4, 8, 2))
    storage.write(b, 0, mx.ones((4, 8)))
    np.testing.assert_array_equal(np.array(storage.read(a)), codes(4, 8, 2))
    assert storage.resident_bytes() == 8 + 64
    storage.release(a)
    storage.release(a)
    assert storage.resident_bytes() == 64


def test_buffers_of_retired_blocks_are_dropped():
    pool, storage = make(8, n_blocks=3)
    for block in pool.allocate("kv", 12, 1):
        storage.write(block, 0, mx.ones((4, 8)))
    pool.free_all(1)
    pool.shrink("kv", 1)
    assert storage.resident_bytes() == 64


@pytest.mark.parametrize(
    ("format", "offset", "values", "match"),
    [
        ("fp16", 3, np.ones((2, 8)), "overflow"),
        ("fp16", -1, np.ones((1, 8)), "overflow"),
        ("fp16", 0, np.ones((1, 7)), "do not fit"),
        ("fp16", 0, np.ones(8), "do not fit"),
        ("int2", 0, np.full((1, 8), 4), "codes from 4 to 4"),
        ("int8", 0, np.full((1, 8), -1), "codes from -1"),
        ("int4", 0, np.full((1, 8), 300, np.int32), "use 0 to 15"),
        ("int4", 0, np.full((1, 8), 1.0), "quantize the values first"),
        ("int3", 0, np.full((1, 8), 1), "'int3', which cannot be stored"),
    ],
)
def test_write_that_cannot_be_stored_is_refused_and_writes_nothing(format, offset, values, match):
    pool, storage = make(8)
    (block,) = pool.allocate("kv", 4, 1, format)
    with pytest.raises(ValueError, match=match):
        storage.write(block, offset, values)
    assert storage.resident_bytes() == 0


def test_empty_write_and_unknown_sizes():
    pool, storage = make(8)
    (block,) = pool.allocate("kv", 4, 1, "int4")
    storage.write(block, 4, np.zeros((0, 8), np.uint8))
    assert storage.resident_bytes() == 0
    with pytest.raises(ValueError, match="head_dim=0"):
        MLXBlockStorage(pool, 0)
