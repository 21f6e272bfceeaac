"""Mixed widths by token as functions on one plain matrix (S, D), for analysis.

Groups run along tokens inside a class, one scale a channel; a last group may be short.
Source: ZipCache (arXiv 2405.14256). Caches use `classed.py`.
"""

import math
from typing import NamedTuple

import mlx.core as mx

from veloxquant.quantizers.saliency import rank

PARAM_BYTES = 4


class ZipCacheState(NamedTuple):
    """Codes of salient (`hi`) and other (`lo`) tokens, uint8 (n, D), scales and minima by group."""

    hi_codes: mx.array
    hi_scales: mx.array
    hi_zeros: mx.array
    lo_codes: mx.array
    lo_scales: mx.array
    lo_zeros: mx.array
    hi_mask: mx.array
    hi_bits: int
    lo_bits: int
    seq_len: int
    head_dim: int
    group_size: int


def token_key_norms(keys: mx.array) -> mx.array:
    """Norm of each key, (S, D) to (S,) fp32."""
    return mx.linalg.norm(keys.astype(mx.float32), axis=-1)


def saliency_mask(norms: mx.array, hi_fraction: float) -> mx.array:
    """The ceil(share · S) tokens of smallest norm, the older of equal ones: bool (S,)."""
    count = math.ceil(hi_fraction * norms.shape[-1])
    return rank(-norms) < count


def _edges(x: mx.array, group_size: int) -> mx.array:
    """Rows (N, D) in groups (groups, group_size, D), the last one filled with its last row."""
    missing = -x.shape[0] % group_size
    if missing:
        x = mx.concatenate([x, mx.repeat(x[-1:], missing, axis=0)], axis=0)
    return x.reshape(-1, group_size, x.shape[-1])


def channel_quant(
    x: mx.array, bits: int, group_size: int = 32
) -> tuple[mx.array, mx.array, mx.array]:
    """Codes uint8 (N, D), scales and minima (groups, D) fp32 of groups of tokens."""
    n, dim = x.shape
    if n == 0:
        none = mx.zeros((0, dim), dtype=mx.float32)
        return none.astype(mx.uint8), none, none
    groups, top = _edges(x.astype(mx.float32), group_size), (1 << bits) - 1
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    scale = (high - low) / top
    codes = mx.where(scale > 0, mx.round((groups - low) / mx.maximum(scale, 1e-30)), 0.0)
    codes = mx.clip(codes, 0, top).astype(mx.uint8).reshape(-1, dim)[:n]
    return codes, scale.squeeze(1), low.squeeze(1)


def channel_dequant(
    codes: mx.array, scales: mx.array, zeros: mx.array, group_size: int = 32
) -> mx.array:
    """Inverse of `channel_quant`: rows (N, D) fp32."""
    group = mx.arange(codes.shape[0]) // group_size
    if not codes.shape[0]:
        return mx.zeros(codes.shape, dtype=mx.float32)
    return codes.astype(mx.float32) * scales[group] + zeros[group]


def zipcache_compress(
    x: mx.array,
    hi_bits: int = 4,
    lo_bits: int = 2,
    hi_fraction: float = 0.2,
    group_size: int = 32,
) -> ZipCacheState:
    """Code (S, D), the tokens of smallest norm at `hi_bits`."""
    mask = saliency_mask(token_key_norms(x), hi_fraction)
    order = mx.argsort(mx.where(mask, 0, x.shape[0]) + mx.arange(x.shape[0]))
    count = math.ceil(hi_fraction * x.shape[0])
    high = channel_quant(x[order[:count]], hi_bits, group_size)
    low = channel_quant(x[order[count:]], lo_bits, group_size)
    n, dim = x.shape
    return ZipCacheState(*high, *low, mask, hi_bits, lo_bits, n, dim, group_size)


def zipcache_reconstruct(state: ZipCacheState) -> mx.array:
    """Rows (S, D) fp16 in their own order."""
    size = state.group_size
    rows = mx.concatenate(
        [
            channel_dequant(state.hi_codes, state.hi_scales, state.hi_zeros, size),
            channel_dequant(state.lo_codes, state.lo_scales, state.lo_zeros, size),
        ]
    )
    at = mx.arange(state.seq_len)
    order = mx.argsort(mx.where(state.hi_mask, 0, state.seq_len) + at)
    return rows[mx.argsort(order)].astype(mx.float16)


def zipcache_bytes(state: ZipCacheState, group_size: int | None = None) -> int:
    """Packed codes, fp32 parameters and one byte a token for the mask."""
    size = group_size or state.group_size
    total = state.seq_len
    for codes, width in ((state.hi_codes, state.hi_bits), (state.lo_codes, state.lo_bits)):
        total += _coded_bytes(codes.shape[0], state.head_dim, width, size)
    return total


def base_only_bytes(S: int, D: int, bits: int, group_size: int = 32) -> int:
    """Bytes of S tokens at one width, with fp32 parameters and no mask."""
    return _coded_bytes(S, D, bits, group_size)


def _coded_bytes(n: int, dim: int, bits: int, group_size: int) -> int:
    return math.ceil(n * dim * bits / 8) + 2 * PARAM_BYTES * dim * math.ceil(n / group_size)


def zipcache_quant_dequant(
    x: mx.array,
    hi_bits: int = 4,
    lo_bits: int = 2,
    hi_fraction: float = 0.2,
    group_size: int = 32,
) -> mx.array:
    """Code (S, D) and reconstruct it in fp16."""
    return zipcache_reconstruct(zipcache_compress(x, hi_bits, lo_bits, hi_fraction, group_size))
