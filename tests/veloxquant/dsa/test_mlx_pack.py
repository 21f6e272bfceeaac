"""Words are MLX's: golden values, round trips, and agreement with `mx.quantize`'s own stream."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.dsa.mlx_pack import pack, unpack

GOLDEN = [
    (2, [0, 1, 2, 3] * 8, [0xE4E4E4E4] * 2),
    (3, list(range(8)) * 4, [0x88FAC688, 0xC688FAC6, 0xFAC688FA]),
    (4, list(range(8)) * 4, [0x76543210] * 4),
    (1, [1, 0] * 16, [0x55555555]),
    (8, [1, 2, 3, 4] * 8, [0x04030201] * 8),
]


@pytest.mark.parametrize(("bits", "codes", "words"), GOLDEN)
def test_golden_words(bits: int, codes: list[int], words: list[int]) -> None:
    assert pack(mx.array(codes, dtype=mx.uint8), bits).tolist() == words


@settings(deadline=None, max_examples=40)
@given(
    bits=st.sampled_from([1, 2, 3, 4, 5, 6, 8]),
    blocks=st.integers(1, 4),
    rows=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_unpack_inverts_pack(bits: int, blocks: int, rows: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, 32 * blocks))
    words = pack(mx.array(codes.astype(np.uint32)), bits)
    assert words.shape == (rows, blocks * bits)
    assert words.dtype == mx.uint32
    stream = sum(int(c) << (bits * i) for i, c in enumerate(codes[0]))
    assert sum(int(w) << (32 * i) for i, w in enumerate(words[0].tolist())) == stream
    assert np.array_equal(np.array(unpack(words, bits, 32 * blocks)), codes)
    assert np.array_equal(np.array(unpack(words, bits, 17)), codes[:, :17])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_words_of_mlx_itself_unpack_to_its_codes(bits: int) -> None:
    x = mx.random.normal((4, 64), key=mx.random.key(bits))
    words, scales, biases = mx.quantize(x, group_size=32, bits=bits)
    codes = unpack(words, bits, 64).astype(mx.float32).reshape(4, 2, 32)
    rows = (codes * scales[..., None] + biases[..., None]).reshape(4, 64)
    assert mx.abs(rows - mx.dequantize(words, scales, biases, 32, bits)).max().item() < 1e-6
    assert mx.array_equal(pack(unpack(words, bits, 64), bits), words).item()


def test_a_part_of_a_word_is_refused() -> None:
    with pytest.raises(ValueError, match="33 codes"):
        pack(mx.zeros((33,), dtype=mx.uint8), 2)
