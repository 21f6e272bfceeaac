"""One direction for the vectors of two layers: interpolated on the sphere, with both lengths.

Tokens whose directions differ much stay as they are: the first layer's row stands in place of the
direction, the second one's in a slot of its block.
Source: MiniCache (arXiv 2405.14366). Differs: a bounded number of tokens of a block stays unmerged,
the least alike first, so the size is known beforehand.
"""

from collections.abc import Sequence

import mlx.core as mx

from veloxquant.quantizers.base import Packed, TokenAxis, headroom
from veloxquant.quantizers.specs.shared import MERGED_BLOCK, MergedSpec
from veloxquant.quantizers.together import TogetherCodec

_TINY = 1e-30
_FLAT = 1e-4
"""Sine of an angle below which a straight line replaces the arc."""
EMPTY = 255
"""Place of a slot that holds nothing."""


def length_and_direction(x: mx.array) -> tuple[mx.array, mx.array]:
    """Lengths (..., 1) and unit vectors (..., D) in fp32; zero has direction zero."""
    x = x.astype(mx.float32)
    peak = mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), _TINY)
    near = x / peak  # squares of large numbers stay finite
    length = mx.sqrt(mx.square(near).sum(axis=-1, keepdims=True))
    return peak * length, near / mx.maximum(length, _TINY)


def slerp_directions(a: mx.array, b: mx.array, t: float) -> mx.array:
    """The unit vector at share `t` of the arc from unit `a` to unit `b`, (..., D) fp32."""
    cosine = mx.clip((a * b).sum(axis=-1, keepdims=True), -1.0, 1.0)
    angle = mx.arccos(cosine)
    sine = mx.sin(angle)
    safe = mx.maximum(sine, _FLAT)
    arc = (mx.sin((1 - t) * angle) * a + mx.sin(t * angle) * b) / safe
    line = (1 - t) * a + t * b
    return length_and_direction(mx.where(sine < _FLAT, line, arc))[1]


class MergedCodec(TogetherCodec):
    """`e` (B, H, T, D) of the first layer, `n` (B, H, T, 1) of each; `y`, `i`: slots of the other.

    `i` is the place of a slot in its block of tokens, 255 for an empty one. In fp16 directions are
    longer than one by the `headroom` that lengths lack.
    """

    borrowed = ("e",)

    def __init__(self, dim: int, spec: MergedSpec) -> None:
        self.dim, self.spec = dim, spec
        self.axes = {"n": TokenAxis(2)}
        if spec.owns:
            self.axes["e"] = TokenAxis(2)
        elif spec.slots:
            self.axes |= {name: TokenAxis(2, spec.slots, MERGED_BLOCK) for name in ("y", "i")}

    def encode_together(self, rows: Sequence[mx.array], fitted: Sequence[Packed]) -> list[Packed]:
        """Directions and lengths of two layers, rows of unlike tokens in slots."""
        del fitted
        x, y = rows[0], rows[-1]
        dtype, (batch, heads, n, dim) = x.dtype, x.shape
        (long_x, unit_x), (long_y, unit_y) = length_and_direction(x), length_and_direction(y)
        room = headroom(dim, dtype)
        shared = (slerp_directions(unit_x, unit_y, self.spec.t) * room).astype(dtype)
        longs = [(long / room).astype(dtype) for long in (long_x, long_y)]
        if not self.spec.slots:
            return [{"e": shared, "n": longs[0]}, {"n": longs[1]}]
        blocks = (batch, heads, n // MERGED_BLOCK, MERGED_BLOCK)
        alike = (unit_x * unit_y).sum(axis=-1).reshape(blocks)
        place = mx.argsort(alike, axis=-1)[..., : self.spec.slots]
        unlike = mx.take_along_axis(alike, place, axis=-1) < self.spec.threshold
        kept = _onehot(mx.where(unlike, place, EMPTY)).any(axis=-2).reshape(batch, heads, n, 1)
        slots = mx.take_along_axis(y.reshape(*blocks, dim), place[..., None], axis=3)
        slots = mx.where(unlike[..., None], slots, 0.0).astype(dtype)
        first = {"e": mx.where(kept, x, shared), "n": mx.where(kept, 1.0, longs[0]).astype(dtype)}
        second = {
            "n": mx.where(kept, 0.0, longs[1]).astype(dtype),
            "y": slots.reshape(batch, heads, -1, dim),
            "i": mx.where(unlike, place, EMPTY).astype(mx.uint8).reshape(batch, heads, -1, 1),
        }
        return [first, second]

    def _places(self, packed: Packed) -> mx.array:
        """Which token each slot stands for: (B, H, blocks, slots, tokens of a block), fp32."""
        index = packed["i"]
        batch, heads = index.shape[:2]
        return _onehot(index.reshape(batch, heads, -1, self.spec.slots)).astype(mx.float32)

    @property
    def _slotted(self) -> bool:
        return not self.spec.owns and self.spec.slots > 0

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Products with directions times lengths, and with the slots."""
        lengths = packed["n"].astype(q.dtype).swapaxes(-1, -2)
        out = (q @ packed["e"].astype(q.dtype).swapaxes(-1, -2)) * lengths
        if not self._slotted:
            return out
        places = self._places(packed).astype(q.dtype)
        batch, heads, rows, _ = q.shape
        blocks = places.shape[2]
        slots = q @ packed["y"].astype(q.dtype).swapaxes(-1, -2)
        slots = slots.reshape(batch, heads, rows, blocks, -1).swapaxes(2, 3)
        return out + (slots @ places).swapaxes(2, 3).reshape(out.shape)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Sums of directions weighted by lengths, and of the slots."""
        lengths = packed["n"].astype(w.dtype).swapaxes(-1, -2)
        out = (w * lengths) @ packed["e"].astype(w.dtype)
        if not self._slotted:
            return out
        places = self._places(packed).astype(w.dtype)
        batch, heads, rows, _ = w.shape
        blocks = places.shape[2]
        own = w.reshape(batch, heads, rows, blocks, MERGED_BLOCK).swapaxes(2, 3)
        slots = (own @ places.swapaxes(-1, -2)).swapaxes(2, 3).reshape(batch, heads, rows, -1)
        return out + slots @ packed["y"].astype(w.dtype)

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        rows = packed["e"].astype(mx.float32) * packed["n"].astype(mx.float32)
        if self._slotted:
            batch, heads, tokens, dim = rows.shape
            places = self._places(packed)
            slots = packed["y"].astype(mx.float32)
            slots = slots.reshape(batch, heads, places.shape[2], -1, dim)
            rows = rows + (places.swapaxes(-1, -2) @ slots).reshape(batch, heads, tokens, dim)
        return rows.astype(dtype)

    def native(self, packed: Packed, start: int, stop: int) -> None:
        """The kernel reads no rows with a length of their own."""
        del packed, start, stop


def _onehot(index: mx.array) -> mx.array:
    """(..., slots) places to (..., slots, tokens of a block); places outside of it are nowhere."""
    return index[..., None] == mx.arange(MERGED_BLOCK)
