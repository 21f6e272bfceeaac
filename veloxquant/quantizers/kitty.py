"""Ranking and mixed widths of channels on plain matrices, for analysis; caches use `boosted`."""

import mlx.core as mx

from veloxquant.quantizers.affine import affine_decode, affine_encode
from veloxquant.quantizers.boosted import liveliest


def rank_channels_by_sensitivity(
    keys: mx.array, hi_fraction: float = 0.25
) -> tuple[list[int], list[int]]:
    """Channels of (S, D) by their variance.

    Returns:
        The floor of `hi_fraction`·D channels of largest variance, and the others, both ascending.
    """
    dim = keys.shape[-1]
    variance = keys.astype(mx.float32).var(axis=0)
    mask = hi_mask_from_variance_batched(variance[None], hi_fraction)[0].tolist()
    assert isinstance(mask, list)
    return [i for i in range(dim) if mask[i]], [i for i in range(dim) if not mask[i]]


def compute_running_variance(key_sum: mx.array, key_sq_sum: mx.array, n: int) -> mx.array:
    """Variance of `n` values from their sum and their sum of squares; zeros if n < 2."""
    if n < 2:
        return mx.zeros(key_sum.shape)
    mean = key_sum.astype(mx.float32) / n
    return mx.maximum(key_sq_sum.astype(mx.float32) / n - mx.square(mean), 0.0)


def hi_mask_from_variance_batched(variance: mx.array, hi_fraction: float) -> mx.array:
    """Which channels of (N, D) get the high width: (N, D) bool, equally many in each row."""
    count = int(hi_fraction * variance.shape[-1] + 1e-9)
    chosen = liveliest(variance, count)
    none = mx.zeros(variance.shape, dtype=mx.bool_)
    return mx.put_along_axis(none, chosen, mx.array(True), axis=-1) if count else none


def quantize_mixed_channels(
    keys: mx.array,
    hi_indices: list[int],
    lo_indices: list[int],
    hi_bit: int = 4,
    lo_bit: int = 2,
    group_size: int = 32,
) -> mx.array:
    """(S, D) quantised per channel and unpacked, with two widths.

    Raises:
        ValueError: unless both lists together name every channel once.
    """
    dim = keys.shape[-1]
    if sorted([*hi_indices, *lo_indices]) != list(range(dim)):
        raise ValueError(f"hi_indices and lo_indices must name each of {dim} channels once")
    mask = mx.array([i in set(hi_indices) for i in range(dim)])
    return quantize_mixed_channels_batched(keys[None], mask[None], hi_bit, lo_bit, group_size)[0]


def quantize_mixed_channels_batched(
    keys: mx.array, hi_mask: mx.array, hi_bit: int = 4, lo_bit: int = 2, group_size: int = 32
) -> mx.array:
    """(N, S, D) quantised per channel and unpacked, `hi_mask` (N, D) naming the finer channels.

    A last group of fewer than `group_size` tokens is filled up with its last token.
    """
    length = keys.shape[1]
    missing = -length % group_size
    rows = keys
    if missing:
        rows = mx.concatenate([keys, mx.repeat(keys[:, -1:], missing, axis=1)], axis=1)
    columns = rows.swapaxes(-1, -2)
    low, high = (
        affine_decode(affine_encode(columns, b, group_size, mx.float32), b, group_size, mx.float32)
        for b in (lo_bit, hi_bit)
    )
    out = mx.where(hi_mask[..., None], high, low).swapaxes(-1, -2)
    return out[:, :length].astype(keys.dtype)
