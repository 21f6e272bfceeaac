"""Affine groups along tokens with more bits for the liveliest channels: the key format of kitty.

A boosted code is split: its low bits lie in the plane of all channels, the others in a second,
dense plane with as many rows a page as channels are boosted. Both planes are stock affine words
with the step of the boosted code, so products are a plain one and, page by page, a small one
with the boosted channels of the query.
Source: Kitty (arXiv 2511.18643), section 4. Differs: channels are ranked by their variance within
the page, to which the error of min/max codes is closer than the paper's mean magnitude.
"""

import mlx.core as mx

from veloxquant.dsa.mlx_pack import pack, unpack
from veloxquant.kernels.native import NativeRun
from veloxquant.quantizers.affine import AffineChannelCodec, affine_encode
from veloxquant.quantizers.base import NativeParts, Packed, Shared, TokenAxis
from veloxquant.quantizers.specs.grouped import BoostedSpec, index_bytes


def liveliest(variance: mx.array, count: int) -> mx.array:
    """The `count` channels of largest variance of (..., D), ascending; equal ones: lower first."""
    return mx.sort(mx.argsort(-variance, axis=-1)[..., :count], axis=-1)


def upper_plane(base: NativeRun, words: mx.array, bits: int, below: int) -> NativeRun:
    """A part that adds codes of `bits` bits above the `below` bits of an affine run.

    `words` are laid out as those of the base, for every row.
    """
    assert base.scale is not None
    # In fp32, where the shifted steps of 16-bit scales cannot overflow.
    scale = base.scale.astype(mx.float32) * (1 << below)
    data = mx.contiguous(words)
    return base._replace(data=data, bits=bits, scale=scale, bias=mx.zeros_like(scale))


class BoostedCodec(Shared):
    """Words, scales and minima of all channels, and of each page its boosted rows.

    `w` (B, H, D, T·low/32), `s`, `b` (B, H, D, pages) as `AffineChannelCodec`; `h` (B, H, pages,
    k, page·(high - low)/32) and `c` (B, H, pages, k), the channels that these rows belong to.
    """

    def __init__(self, dim: int, spec: BoostedSpec) -> None:
        self.dim, self.spec = dim, spec
        self.base = AffineChannelCodec(dim, spec.base)
        self.count = spec.boosted(dim)
        self.extra = spec.high - spec.low
        page = TokenAxis(2, 1, spec.group)
        self.axes = {**self.base.axes, **({"h": page, "c": page} if self.count else {})}
        self.limits = {"c": dim} if self.count else {}
        self._index = mx.uint8 if index_bytes(dim) == 1 else mx.uint16

    # ---- coding -------------------------------------------------------------------------

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D), n a multiple of the page."""
        packed = self.base.encode(x)
        if not self.count:
            return packed
        low, page = self.spec.low, self.spec.group
        batch, heads, n, dim = x.shape
        pages = x.astype(mx.float32).reshape(batch, heads, n // page, page, dim)
        chosen = liveliest(pages.var(axis=3), self.count)
        picked = mx.take_along_axis(pages.swapaxes(-1, -2), chosen[..., None], axis=3)
        fine = affine_encode(picked, self.spec.high, page, x.dtype)
        codes = unpack(fine["w"], self.spec.high, page)
        at = chosen.swapaxes(2, 3)
        words = packed["w"].reshape(batch, heads, dim, n // page, -1)
        below = pack(codes & ((1 << low) - 1), low).swapaxes(2, 3)
        out: Packed = {"w": mx.put_along_axis(words, at[..., None], below, axis=2)}
        out["w"] = out["w"].reshape(packed["w"].shape)
        for name in ("s", "b"):
            new = fine[name].squeeze(-1).swapaxes(2, 3)
            out[name] = mx.put_along_axis(packed[name], at, new, axis=2)
        return {**out, "h": pack(codes >> low, self.extra), "c": chosen.astype(self._index)}

    def _boost_steps(self, packed: Packed) -> mx.array:
        """What one unit of a boosted row is worth: (B, H, pages, k)."""
        steps = packed["s"].swapaxes(2, 3)
        return mx.take_along_axis(steps, packed["c"], axis=-1) * (1 << self.spec.low)

    # ---- products -----------------------------------------------------------------------

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ: all channels from the base plane, the rest of the boosted ones page by page."""
        out = self.base.scores(q, packed)
        if not self.count:
            return out
        batch, heads, rows, _ = q.shape
        pages = packed["c"].shape[2]
        at = packed["c"].reshape(batch, heads, 1, -1)
        own = mx.take_along_axis(q, at, axis=-1).reshape(batch, heads, rows, pages, -1)
        steps = self._boost_steps(packed).astype(q.dtype)[..., None]
        extra = mx.quantized_matmul(
            own.swapaxes(2, 3), packed["h"], steps, mx.zeros_like(steps),
            transpose=False, group_size=self.spec.group, bits=self.extra,
        )  # fmt: skip
        return out + extra.swapaxes(2, 3).reshape(batch, heads, rows, -1)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V from unpacked rows; the format is meant for keys."""
        return w @ self.decode(packed, w.dtype)

    def native(self, packed: Packed, start: int, stop: int) -> NativeParts:
        """Both planes, the second spread over all channels for the time of a step."""
        plain = self.base.native(packed, start, stop)
        if not self.count:
            return plain
        batch, heads, pages, _, words = packed["h"].shape
        at = packed["c"].swapaxes(2, 3)[..., None]
        wide = mx.zeros((batch, heads, self.dim, pages, words), dtype=mx.uint32)
        wide = mx.put_along_axis(wide, at, packed["h"].swapaxes(2, 3), axis=2)
        return plain, upper_plane(
            plain, wide.reshape(batch, heads, self.dim, -1), self.extra, self.spec.low
        )

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        if not self.count:
            return self.base.decode(packed, dtype)
        page = self.spec.group
        rows = self.base.decode(packed, mx.float32)
        batch, heads, n, dim = rows.shape
        pages = rows.reshape(batch, heads, n // page, page, dim)
        codes = unpack(packed["h"], self.extra, page).astype(mx.float32)
        extra = (codes * self._boost_steps(packed).astype(mx.float32)[..., None]).swapaxes(-1, -2)
        at = packed["c"][:, :, :, None]
        pages = mx.put_along_axis(
            pages, at, mx.take_along_axis(pages, at, axis=-1) + extra, axis=-1
        )
        return pages.reshape(rows.shape).astype(dtype)
