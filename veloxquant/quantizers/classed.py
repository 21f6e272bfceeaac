"""Blocks of tokens in classes of fixed sizes, each class in a codec of its own.

A block is sorted by class, order kept inside a class, and every class is one long array: a block
adds the same number of tokens to each, so arrays are rectangular for all heads. The class of each
token is kept in one or two bits, from which the order of the tokens is found again. `by_class`
hands the classes out as they lie: attention that sees all of them needs no order.
"""

from typing import ClassVar, NamedTuple, cast

import mlx.core as mx

from veloxquant.dsa.mlx_pack import pack, unpack
from veloxquant.quantizers.base import Codec, FittedCodec, Packed, Shared, TokenAxis
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.fitted import for_batch
from veloxquant.quantizers.saliency import rank, small_norm_saliency
from veloxquant.quantizers.specs.tiered import ClassedSpec


class Part(NamedTuple):
    """One class: its number, its codec and its tokens in a block."""

    number: int
    codec: Codec
    tokens: int


def _blocks(x: mx.array, size: int) -> mx.array:
    """Split the token axis, axis 2 of (B, H, n, ...), into blocks."""
    batch, heads, n, *rest = x.shape
    return x.reshape(batch, heads, n // size, size, *rest)


class ClassedCodec(Shared):
    """Arrays of class i are those of its codec with `i` behind their names; `m` is the map.

    `given` are constants of one sequence, (1, H, ...), to take instead of fitted ones.
    """

    whole: ClassVar[frozenset[str]] = frozenset()
    """Arrays of which every block may need those of all blocks before."""

    def __init__(self, dim: int, spec: ClassedSpec, given: Packed | None = None) -> None:
        self.dim, self.spec, self.given = dim, spec, given or {}
        self.parts = [
            Part(i, codec_for(inner, dim), count)
            for i, (count, inner) in enumerate(spec.classes)
            if count
        ]
        self.axes = {"m": TokenAxis(2, spec.map_bits, 32)}
        for part in self.parts:
            for name, (axis, num, den) in part.codec.axes.items():
                self.axes[f"{name}{part.number}"] = TokenAxis(
                    axis, num * part.tokens, den * spec.size
                )
        self.limits = {
            f"{name}{part.number}" if name in part.codec.axes else name: limit
            for part in self.parts
            for name, limit in part.codec.limits.items()
        }

    # ---- coding -------------------------------------------------------------------------

    def fit(self, x: mx.array) -> Packed:
        """The constants that all classes share."""
        if self.given:
            typed = {
                name: a.astype(x.dtype) if mx.issubdtype(a.dtype, mx.floating) else a
                for name, a in self.given.items()
            }
            return for_batch(typed, x.shape[0])
        return cast(FittedCodec, self.parts[0].codec).fit(x)

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) with the classes that the rows' own norms give."""
        return self.encode_marked(x, self.classes(small_norm_saliency(x)), {})

    def encode_fitted(self, x: mx.array, fitted: Packed) -> Packed:
        """As `encode`, with shared constants."""
        return self.encode_marked(x, self.classes(small_norm_saliency(x)), fitted)

    def classes(self, saliency: mx.array) -> mx.array:
        """Class of each token (B, H, n) by rank inside its block: the most salient are class 0."""
        place = rank(_blocks(saliency, self.spec.size))
        out, last = mx.zeros(place.shape, dtype=mx.uint32), 0
        for count, _ in self.spec.classes[:-1]:
            last += count
            out = out + (place >= last)
        return out.reshape(saliency.shape)

    def encode_marked(self, x: mx.array, classes: mx.array, fitted: Packed) -> Packed:
        """Pack (B, H, n, D), n a multiple of the block.

        Args:
            x: rows.
            classes: (B, H, n) numbers of classes, of each as many in a block as the format says.
            fitted: constants, empty for formats without any.
        """
        batch, heads, n, dim = x.shape
        size = self.spec.size
        order = self.sorted_places(classes)
        rows = mx.take_along_axis(_blocks(x, size), order[..., None], axis=3)
        out, start = {"m": self.map_of(classes)}, 0
        for part in self.parts:
            own = rows[:, :, :, start : start + part.tokens]
            own = mx.contiguous(own.reshape(batch, heads, n // size * part.tokens, dim))
            start += part.tokens
            if part.codec.spec.fit_tokens:
                coded = cast(FittedCodec, part.codec).encode_fitted(own, fitted)
            else:
                coded = part.codec.encode(own)
            out |= {f"{name}{part.number}": a for name, a in coded.items()}
        return out

    def map_of(self, classes: mx.array) -> mx.array:
        """Classes (B, H, n) as they are kept: (B, H, n·bits/32) uint32."""
        return pack(classes, self.spec.map_bits)

    def fault(self, packed: Packed) -> str | None:
        """What is impossible in the arrays of a class; any map of classes can be read."""
        found = (part.codec.fault(own) for part, own in self.by_class(packed))
        return next((text for text in found if text), None)

    # ---- order --------------------------------------------------------------------------

    def sorted_places(self, classes: mx.array) -> mx.array:
        """Places in the block of its tokens sorted by class: (B, H, blocks, size)."""
        at = mx.arange(self.spec.size, dtype=mx.uint32)
        key = _blocks(classes.astype(mx.uint32), self.spec.size) * self.spec.size + at
        return mx.argsort(key, axis=-1)

    def order(self, packed: Packed) -> mx.array:
        """As `sorted_places`, from the map."""
        words = packed["m"]
        n = words.shape[-1] * 32 // self.spec.map_bits
        return self.sorted_places(unpack(words, self.spec.map_bits, n))

    def by_class(self, packed: Packed) -> list[tuple[Part, Packed]]:
        """The arrays of each class under the names of its codec, shared constants included."""
        constants = {name: a for name, a in packed.items() if name not in self.axes}
        return [
            (part, {name: packed[f"{name}{part.number}"] for name in part.codec.axes} | constants)
            for part in self.parts
        ]

    # ---- reading in order ---------------------------------------------------------------

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ, tokens in their own order."""
        pieces = [
            _split(part.codec.scores(q, own), part.tokens) for part, own in self.by_class(packed)
        ]
        sorted_scores = mx.concatenate(pieces, axis=-1)
        back = mx.argsort(self.order(packed), axis=-1)[:, :, None]
        out = mx.take_along_axis(sorted_scores, back, axis=-1)
        return out.reshape(*out.shape[:3], -1)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V, weights in the order of the tokens."""
        wide = mx.take_along_axis(
            _split(w, self.spec.size), self.order(packed)[:, :, None], axis=-1
        )
        out, start = mx.zeros((), dtype=w.dtype), 0
        for part, own in self.by_class(packed):
            piece = wide[..., start : start + part.tokens]
            out = out + part.codec.mix(piece.reshape(*piece.shape[:3], -1), own)
            start += part.tokens
        return out

    def native(self, packed: Packed, start: int, stop: int) -> None:
        """None: in their own order the tokens of a class do not lie side by side."""
        del packed, start, stop

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D), tokens in their own order."""
        rows = mx.concatenate(
            [_blocks(part.codec.decode(own, dtype), part.tokens)
             for part, own in self.by_class(packed)],
            axis=3,
        )  # fmt: skip
        back = mx.argsort(self.order(packed), axis=-1)
        out = mx.take_along_axis(rows, back[..., None], axis=3)
        return out.reshape(*out.shape[:2], -1, self.dim)


def _split(x: mx.array, size: int) -> mx.array:
    """(B, H, M, n) to (B, H, M, blocks, size)."""
    return x.reshape(*x.shape[:3], -1, size)
