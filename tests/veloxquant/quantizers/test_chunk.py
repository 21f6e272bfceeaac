"""Chunk and token codes: half a step of error at most, products as of the decoded rows."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.cache.store import Store
from veloxquant.quantizers.chunk import ChunkCodec, SymmetricCodec
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.coded import ChunkSpec, SymmetricSpec

BITS = (2, 3, 4, 5, 6, 8)


def rows(tokens: int, dim: int, seed: int = 0) -> mx.array:
    x = mx.random.normal((2, 3, tokens, dim), key=mx.random.key(seed))
    return x * mx.where(mx.arange(dim) == 3, 9.0, 1.0) + 0.5


@pytest.mark.parametrize("bits", BITS)
def test_chunks_are_min_max_grids_by_channel(bits: int) -> None:
    x = rows(512, 40)
    codec = ChunkCodec(40, ChunkSpec(bits, 256))
    packed = codec.encode(x)
    got = np.array(codec.decode(packed, mx.float32))
    chunks = np.array(x).reshape(2, 3, 2, 256, 40)
    low, high = chunks.min(axis=3, keepdims=True), chunks.max(axis=3, keepdims=True)
    step = (high - low) / ((1 << bits) - 1)
    wanted = low + np.round((chunks - low) / step) * step
    assert np.abs(got.reshape(chunks.shape) - wanted).max() < 1e-4 or bits == 8
    assert (np.abs(got.reshape(chunks.shape) - chunks) <= step * 0.5001 + 1e-5).all()
    assert sum(a.nbytes for a in packed.values()) == 6 * codec.spec.nbytes(512, 40, 4)
    codes = np.array(codec.codes(packed))
    assert codes.shape == (2, 3, 40, 512)
    assert codes.max() == (1 << bits) - 1


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_tokens_are_symmetric_grids(bits: int, dim: int) -> None:
    x = rows(7, dim)
    codec = SymmetricCodec(dim, SymmetricSpec(bits))
    packed = codec.encode(x)
    got = codec.decode(packed, mx.float32)
    step = mx.abs(x).max(axis=-1, keepdims=True) / ((1 << (bits - 1)) - 1)
    assert (mx.abs(got - x) <= 0.5001 * step + 1e-6).all().item()
    assert sum(a.nbytes for a in packed.values()) == 6 * codec.spec.nbytes(7, dim, 4)
    alone = codec.encode(x[:, :, 3:4])
    assert all(mx.array_equal(alone[n], packed[n][:, :, 3:4]).item() for n in packed)


@pytest.mark.parametrize(
    "codec", [ChunkCodec(80, ChunkSpec(4, 256)), SymmetricCodec(80, SymmetricSpec(3))]
)
def test_products_are_those_of_the_decoded_rows(codec: ChunkCodec | SymmetricCodec) -> None:
    packed = codec.encode(rows(256, 80))
    plain = codec.decode(packed, mx.float32)
    q = mx.random.normal((2, 3, 4, 80), key=mx.random.key(1))
    w = mx.softmax(mx.random.normal((2, 3, 4, 256), key=mx.random.key(2)), axis=-1)
    assert mx.abs(codec.scores(q, packed) - q @ plain.swapaxes(-1, -2)).max().item() < 1e-3
    assert mx.abs(codec.mix(w, packed) - w @ plain).max().item() < 1e-4


def test_constant_and_zero_rows() -> None:
    for codec in (ChunkCodec(64, ChunkSpec(4, 256)), SymmetricCodec(64, SymmetricSpec(4))):
        for value in (0.0, 3.0):
            x = mx.full((1, 1, 256, 64), value)
            assert mx.abs(codec.decode(codec.encode(x), mx.float32) - x).max().item() < 1e-6


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("tokens", [100, 400])
def test_rows_at_the_end_of_fp16_keep_their_other_channels(bits: int, tokens: int) -> None:
    x = mx.ones((1, 2, tokens, 64), dtype=mx.float16)
    x[..., 3] = 65504
    store = Store(codec_for(SymmetricSpec(bits), 64), 256)
    store.append(x)
    rows = store.decode(0, tokens, mx.float16).astype(mx.float32)
    step = 65504 / ((1 << (bits - 1)) - 1)
    assert mx.abs(rows - x.astype(mx.float32)).max().item() <= 0.51 * step
