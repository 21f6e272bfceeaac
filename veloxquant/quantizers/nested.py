"""Affine grids that lie in one another, so that codes are narrowed without the vectors.

A grid of b bits between two end points has 2^b - 1 steps. 255 = 17·15 and 15 = 5·3: the points of
4 bits are points of 8 bits, those of 2 bits are points of 4. Narrowing is then one rounded division
of the codes; end points stay, nothing is decoded, and no error piles up. Widths that do not
divide one another round twice, at most half a step of the wider grid each time.
Source: none; a property of min/max grids. `mx.quantize` moves its end points and loses it.
"""

import itertools

import mlx.core as mx

from veloxquant.dsa.mlx_pack import WORD, pack, unpack
from veloxquant.quantizers.affine import (
    AffineChannelCodec,
    AffineTokenCodec,
    is_coarse,
    stored_step,
)
from veloxquant.quantizers.base import Packed
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.tiered import NestedChannelSpec, NestedTokenSpec


def renumber(codes: mx.array, old: int, new: int) -> mx.array:
    """Codes of `old` bits on the grid of `new` bits with the same end points, half rounded up."""
    have, want = (1 << old) - 1, (1 << new) - 1
    # `have` is odd, so no code lies on a tie: fp32 is exact here, and faster than a division.
    return (codes.astype(mx.float32) * (want / have) + 0.5).astype(mx.uint32)


def recode(packed: Packed, old: int, new: int) -> Packed:
    """Packed groups of `old` bits as groups of `new` bits; scales follow, minima stay.

    Args:
        packed: `w`, `s`, `b` of an affine codec, groups along the last axis.
        old: bits of the codes.
        new: bits wanted, fewer or more.
    """
    if old == new:
        return packed
    words, scale = packed["w"], packed["s"]
    had = unpack(words, old, words.shape[-1] * WORD // old)
    codes = renumber(had, old, new)
    factor = ((1 << old) - 1) / ((1 << new) - 1)
    step = (scale.astype(mx.float32) * factor).astype(scale.dtype)
    if scale.dtype == mx.float16:
        groups = had.reshape(*scale.shape, had.shape[-1] // scale.shape[-1])
        small, small_step = _recode_small(groups, scale, new)
        coarse = is_coarse(scale)
        codes = mx.where(coarse[..., None], small, codes.reshape(groups.shape)).reshape(had.shape)
        step = mx.where(coarse, small_step, step)
    return {"w": pack(codes, new), "s": step, "b": packed["b"]}


def _recode_small(codes: mx.array, scale: mx.array, new: int) -> tuple[mx.array, mx.array]:
    """As `recode` for groups (..., group) whose step fp16 can hardly tell from zero.

    Such steps were rounded up, so the codes end below the last one and the new grid begins and ends
    where they do. Codes that fit into the new width stay: fractions of such a step are lost.
    """
    top = (1 << new) - 1
    most, old = codes.max(axis=-1, keepdims=True), scale.astype(mx.float32)[..., None]
    step = stored_step(old * most.astype(mx.float32) / top, scale.dtype)
    wide = mx.maximum(step.astype(mx.float32), 1e-30)
    fewer = mx.clip(mx.floor(codes.astype(mx.float32) * old / wide + 0.5), 0, top)
    fits = most <= top
    return (
        mx.where(fits, codes, fewer.astype(mx.uint32)),
        mx.where(fits, scale[..., None], step).squeeze(-1),
    )


def recode_along(packed: Packed, widths: tuple[int, ...]) -> Packed:
    """Pass from width to width, as tokens do that age one tier at a time."""
    for old, new in itertools.pairwise(widths):
        packed = recode(packed, old, new)
    return packed


class NestedChannelCodec(AffineChannelCodec):
    """Groups of tokens: coded at the first width of the chain, then narrowed to the last."""

    def __init__(self, dim: int, spec: NestedChannelSpec) -> None:
        super().__init__(dim, spec)
        self.chain = spec.chain
        self._first = AffineChannelCodec(dim, AffineChannelSpec(spec.chain[0], spec.group))

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D), n a multiple of the group."""
        return recode_along(self._first.encode(x), self.chain)


class NestedTokenCodec(AffineTokenCodec):
    """Groups of channels: coded at the first width of the chain, then narrowed to the last."""

    def __init__(self, dim: int, spec: NestedTokenSpec) -> None:
        super().__init__(dim, spec)
        self.chain = spec.chain
        self._first = AffineTokenCodec(dim, AffineTokenSpec(spec.chain[0], spec.group))

    def encode(self, x: mx.array, dtype: mx.Dtype | None = None) -> Packed:
        """Pack (B, H, n, D) for any n; every token alone. Scales in `dtype`, else as `x`."""
        return recode_along(self._first.encode(x, dtype), self.chain)
