"""Importance of heads and bits by head on plain arrays, for analysis; caches use `head_bits`."""

from collections.abc import Sequence

import mlx.core as mx

from veloxquant.allocators.head_bits import allocate_head_bits
from veloxquant.quantizers.affine import affine_decode, affine_encode
from veloxquant.quantizers.importance import head_entropy

__all__ = [
    "allocate_head_bits",
    "compute_head_attention_entropy",
    "compute_head_norm_variance",
    "quantize_head",
    "quantize_heads_batched",
]


def compute_head_norm_variance(keys: mx.array) -> mx.array:
    """Variance over tokens of the key norms of each head of (B, H, S, D), mean of B: (H,)."""
    return mx.linalg.norm(keys.astype(mx.float32), axis=-1).var(axis=-1).mean(axis=0)


def compute_head_attention_entropy(keys: mx.array, obs_window: int = 32) -> mx.array:
    """Entropy of each head's attention with its newest keys as queries, over the largest: (H,).

    Args:
        keys: (B, H, S, D).
        obs_window: how many of the newest keys are taken as queries.
    """
    return head_entropy(keys.astype(mx.float32), obs_window).mean(axis=0)


def quantize_head(keys_h: mx.array, b: int, group_size: int = 32) -> mx.array:
    """(S, D) quantised per channel at `b` bits and unpacked."""
    return quantize_heads_batched(keys_h[None, None], [b], group_size)[0, 0]


def quantize_heads_batched(
    keys: mx.array, head_bits: Sequence[int], group_size: int = 32
) -> mx.array:
    """(B, H, S, D) quantised per channel, each head at its own bits, and unpacked.

    A last group of fewer than `group_size` tokens is filled up with its last token.

    Raises:
        ValueError: unless there is one width a head.
    """
    _, heads, length, _ = keys.shape
    if len(head_bits) != heads:
        raise ValueError(f"{len(head_bits)} widths for {heads} heads; give one a head")
    missing = -length % group_size
    rows = keys
    if missing:
        rows = mx.concatenate([keys, mx.repeat(keys[:, :, -1:], missing, axis=2)], axis=2)
    columns, out = rows.swapaxes(-1, -2), mx.zeros((), dtype=mx.float32)
    bits = mx.array(list(head_bits))[:, None, None]
    for width in sorted(set(head_bits)):
        packed = affine_encode(columns, width, group_size, mx.float32)
        out = mx.where(bits == width, affine_decode(packed, width, group_size, mx.float32), out)
    return out.swapaxes(-1, -2)[:, :, :length].astype(keys.dtype)
