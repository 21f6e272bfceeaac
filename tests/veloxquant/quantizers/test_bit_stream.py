import mlx.core as mx
import numpy as np
import pytest

from veloxquant.quantizers.bit_stream import pack_codes, stream_words, unpack_codes


def test_golden_words_of_twelve_bits() -> None:
    codes = mx.array([0x001, 0x7FF, 0xABC, 0xFFF, 0, 1, 2, 3])
    assert [hex(w) for w in pack_codes(codes, 12).tolist()] == [
        "0xbc7ff001", "0x1000fffa", "0x300200",
    ]  # fmt: skip


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("n", [1, 5, 16, 32, 50])
def test_codes_come_back_and_take_whole_words_only(bits: int, n: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (2, 3, n)).astype(np.uint32)
    words = pack_codes(mx.array(codes), bits)
    assert words.dtype == mx.uint32
    assert words.shape == (2, 3, -(-n * bits // 32)) == (2, 3, stream_words(n, bits))
    assert np.array_equal(np.array(unpack_codes(words, bits, n)), codes)
    number = sum(int(c) << (i * bits) for i, c in enumerate(codes[0, 0]))
    assert number == sum(int(w) << (32 * i) for i, w in enumerate(np.array(words)[0, 0]))
