"""Channel reordering and clipped groups on plain matrices, for analysis; caches use `permuted`."""

from collections.abc import Sequence

import mlx.core as mx

from veloxquant.quantizers.permuted import channel_orders, clipped

DEFAULT_ALPHA_GRID = (1.0, 0.97, 0.94, 0.9, 0.85)
_GROUP = 32
_FLOOR = 1e-30


def channel_permutation(x: mx.array) -> mx.array:
    """An order in which neighbouring channels of (N, D) have like ranges or like middles.

    Of the two orders the one with the smaller error at 2 bits and 32 channels a group is taken.

    Returns:
        (D,) int32; constant statistics give the identity.
    """
    x = x.astype(mx.float32)
    ways = [way.reshape(-1) for way in channel_orders(x)]
    lost = [mx.square(skvq_round_trip(x, way, 2, _GROUP, (1.0,)) - x).mean() for way in ways]
    return mx.where(lost[1] < lost[0], ways[1], ways[0]).astype(mx.int32)


def invert_permutation(perm: mx.array) -> mx.array:
    """The permutation that undoes `perm`."""
    return mx.argsort(perm).astype(mx.int32)


def apply_permutation(x: mx.array, perm: mx.array) -> mx.array:
    """Channels of the last axis in the order of `perm`."""
    return mx.take(x, perm, axis=-1)


def clipped_group_quant(
    x: mx.array, bits: int, group_size: int, alphas: Sequence[float] = DEFAULT_ALPHA_GRID
) -> tuple[mx.array, mx.array, mx.array]:
    """Quantise groups of channels of each row, each group with its best clip factor.

    Args:
        x: (N, D); a last group is filled up with its last channel.
        bits: 1 to 8.
        group_size: channels of a group.
        alphas: factors to try; the first of equally good ones is taken.

    Returns:
        Codes (N, groups, group_size) uint8, minima and scales (N, groups) fp32.
    """
    x = x.astype(mx.float32)
    n, d = x.shape
    missing = -d % group_size
    if missing:
        x = mx.concatenate([x, mx.repeat(x[:, -1:], missing, axis=-1)], axis=-1)
    groups, top = x.reshape(n, -1, group_size), (1 << bits) - 1
    best = None
    for alpha in alphas:
        shrunk = clipped(x, group_size, alpha).reshape(groups.shape)
        low, high = shrunk.min(axis=-1, keepdims=True), shrunk.max(axis=-1, keepdims=True)
        scale = (high - low) / top
        step = mx.maximum(scale, _FLOOR)
        codes = mx.where(scale > 0, mx.clip(mx.round((shrunk - low) / step), 0, top), 0.0)
        error = mx.square(codes * scale + low - groups).mean(axis=-1, keepdims=True)
        now = (error, codes, low, scale)
        if best is None:
            best = now
        else:
            better = error < best[0]
            best = tuple(mx.where(better, a, b) for a, b in zip(now, best, strict=True))
    if best is None:
        raise ValueError("alphas is empty; give at least one clip factor")
    _, codes, low, scale = best
    return codes.astype(mx.uint8), low.squeeze(-1), scale.squeeze(-1)


def clipped_group_dequant(
    codes: mx.array, lo: mx.array, scale: mx.array, group_size: int, d: int
) -> mx.array:
    """Inverse of `clipped_group_quant`: (N, d) fp32."""
    rows = codes.astype(mx.float32).reshape(*lo.shape, group_size) * scale[..., None]
    return (rows + lo[..., None]).reshape(lo.shape[0], -1)[:, :d]


def skvq_round_trip(
    x: mx.array,
    perm: mx.array | None,
    bits: int,
    group_size: int,
    alphas: Sequence[float] = DEFAULT_ALPHA_GRID,
) -> mx.array:
    """(N, D) reordered by `perm` if given, quantised, unpacked and put back, in the type of `x`."""
    rows = x if perm is None else apply_permutation(x, perm)
    packed = clipped_group_quant(rows, bits, group_size, alphas)
    out = clipped_group_dequant(*packed, group_size, x.shape[-1])
    return (out if perm is None else apply_permutation(out, invert_permutation(perm))).astype(
        x.dtype
    )


def skvq_compressed_bytes(n_tokens: int, d: int, bits: int, group_size: int) -> int:
    """Bytes of codes and of a 16-bit minimum and scale for every token and group."""
    return n_tokens * (d * bits // 8 + 4 * -(-d // group_size))


def skvq_fp16_bytes(n_tokens: int, d: int) -> int:
    """Bytes of one 16-bit matrix of `n_tokens` rows."""
    return 2 * n_tokens * d
