"""Codes of any width as one little-endian bit stream a row, padded to whole words only.

The layout is that of `dsa.mlx_pack`, for any number of codes and any width up to 16 bits.
"""

from functools import lru_cache

import mlx.core as mx

from veloxquant.dsa.mlx_pack import WORD, pack
from veloxquant.quantizers.sizes import round_up


def stream_words(n: int, bits: int) -> int:
    """uint32 words of `n` codes."""
    return -(-n * bits // WORD)


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Codes (..., n) below 2^bits to words (..., ceil(n·bits/32)) uint32."""
    n = codes.shape[-1]
    missing = round_up(n, WORD) - n
    if missing:
        codes = mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    words = pack(codes, bits)
    return words[..., : stream_words(n, bits)] if missing else words


@lru_cache(maxsize=64)
def _places(n: int, bits: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Word, shift, next word and left shift of each code."""
    starts = [i * bits for i in range(n)]
    last = stream_words(n, bits) - 1
    out = (
        mx.array([s // WORD for s in starts], dtype=mx.uint32),
        mx.array([s % WORD for s in starts], dtype=mx.uint32),
        mx.array([min(s // WORD + 1, last) for s in starts], dtype=mx.uint32),
        # Two shifts, since a shift by a whole word has no meaning.
        mx.array([WORD - 1 - s % WORD for s in starts], dtype=mx.uint32),
    )
    mx.eval(*out)
    return out


def unpack_codes(words: mx.array, bits: int, n: int) -> mx.array:
    """Words of `pack_codes` back to codes (..., n) uint32."""
    mask = mx.array((1 << bits) - 1, dtype=mx.uint32)
    if WORD % bits == 0:
        shifts = mx.arange(WORD // bits, dtype=mx.uint32) * bits
        codes = (words[..., None] >> shifts) & mask
        return codes.reshape(*words.shape[:-1], -1)[..., :n]
    word, shift, following, rest = _places(n, bits)
    low = mx.take(words, word, axis=-1) >> shift
    high = (mx.take(words, following, axis=-1) << rest) << 1
    return (low | high) & mask
