"""Pack small integers into uint32 words in MLX's order: one little-endian bit stream a row."""

import mlx.core as mx

WORD = 32


def pack(codes: mx.array, bits: int) -> mx.array:
    """Codes (..., n) below 2^bits, n a multiple of 32, to words (..., n·bits/32) uint32."""
    *lead, n = codes.shape
    if n % WORD:
        raise ValueError(f"cannot pack {n} codes; the last axis must be a multiple of {WORD}")
    lanes = codes.astype(mx.uint32)
    if WORD % bits == 0:
        per_word = WORD // bits
        shifts = mx.arange(per_word, dtype=mx.uint32) * bits
        return (lanes.reshape(*lead, n // per_word, per_word) << shifts).sum(axis=-1)
    # Widths that straddle words: 32 codes make `bits` words.
    lanes = lanes.reshape(*lead, n // WORD, WORD)
    starts = [i * bits for i in range(WORD)]
    low = lanes << mx.array([s % WORD for s in starts], dtype=mx.uint32)
    spill = [(WORD - s % WORD) if s % WORD + bits > WORD else 0 for s in starts]
    high = lanes >> mx.array(spill, dtype=mx.uint32)
    words = []
    for w in range(bits):
        inside = [i for i, s in enumerate(starts) if s // WORD == w]
        word = low[..., inside[0] : inside[-1] + 1].sum(axis=-1)
        first = inside[0]
        if first and spill[first - 1]:
            word = word + high[..., first - 1]
        words.append(word)
    return mx.stack(words, axis=-1).reshape(*lead, n // WORD * bits)


def unpack(words: mx.array, bits: int, n: int) -> mx.array:
    """Words (..., n·bits/32) back to codes (..., n) uint32."""
    *lead, width = words.shape
    if WORD % bits == 0:
        per_word = WORD // bits
        shifts = mx.arange(per_word, dtype=mx.uint32) * bits
        codes = (words[..., None] >> shifts) & mx.array((1 << bits) - 1, dtype=mx.uint32)
        return codes.reshape(*lead, width * per_word)[..., :n]
    # mx.dequantize reads the same bit stream; scale 1 and bias 0 return the codes themselves.
    total = width * WORD // bits
    one = mx.broadcast_to(mx.array(1.0), (*lead, total // WORD))
    codes = mx.dequantize(words, one, mx.zeros_like(one), group_size=WORD, bits=bits)
    return codes.astype(mx.uint32)[..., :n]
