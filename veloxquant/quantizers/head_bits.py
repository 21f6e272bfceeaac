"""Affine groups whose width differs by head and block: the format of adakv.

A code is split: its lowest bits lie in the plane of all heads, the others in tiles, one a unit of
bits, block and head. Every block of a layer has a planned number of tiles, so arrays are
rectangular and their size does not depend on the text; only which head a tile belongs to does, and
that is written on it. Both are stock affine words with the step of the whole code.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.allocators.head_bits import allocate_units
from veloxquant.dsa.mlx_pack import pack
from veloxquant.quantizers.affine import AffineChannelCodec, AffineTokenCodec, affine_encode
from veloxquant.quantizers.base import NativeParts, Packed, Shared, TokenAxis
from veloxquant.quantizers.boosted import upper_plane
from veloxquant.quantizers.importance import block_sums, importance_of
from veloxquant.quantizers.levels import codes_of
from veloxquant.quantizers.specs.head_bits import (
    HeadBitsChannelSpec,
    HeadBitsSpec,
    HeadBitsTokenSpec,
    TilePlan,
)


class TileAxis(TokenAxis):
    """Where tiles lie: on the axis of the heads, as many for each block as planned."""

    plan: TilePlan
    group: int

    @classmethod
    def of(cls, spec: HeadBitsSpec) -> "TileAxis":
        """The axis of a format's tiles."""
        made = cls(1)
        made.plan, made.group = spec.tiles, spec.group
        return made

    def at(self, tokens: int) -> int:
        """Tiles of the first `tokens` tokens."""
        return self.plan.after(tokens // self.group)


class _HeadBitsCodec(Shared):
    """What keys and values share; a block is seen as `rows` rows of `columns` codes.

    Beside the base's arrays: tiles `x` (B, tiles, rows, columns·unit/32), what is written on them
    `t` (B, tiles) uint32, block·2^16 + head·2^8 + plane; and `n` (B, H, blocks) uint32,
    block·2^8 + units of the head.
    """

    base: Any
    rows: int
    columns: int

    def __init__(self, dim: int, spec: HeadBitsSpec) -> None:
        self.dim, self.spec = dim, spec
        self.axes = {
            **self.base.axes, "x": TileAxis.of(spec), "t": TileAxis.of(spec),
            "n": TokenAxis(2, 1, spec.group),
        }  # fmt: skip

    # ---- what differs -------------------------------------------------------------------

    def _tiled(self, x: mx.array) -> mx.array:
        """Rows (B, H, n, D) as (B, H, blocks, rows, columns)."""
        raise NotImplementedError

    def _laid(self, a: mx.array) -> mx.array:
        """An array of the base, (B, H, blocks, rows, m), as the base stores it."""
        raise NotImplementedError

    def _steps(self, packed: Packed) -> mx.array:
        """Steps of all blocks, (B, H·blocks, rows, groups)."""
        raise NotImplementedError

    # ---- coding -------------------------------------------------------------------------

    def encode_units(self, x: mx.array, units: mx.array, first: int) -> Packed:
        """Pack (B, H, n, D), block number `first` and the following, in given widths.

        Args:
            x: rows of whole blocks.
            units: (B, H, blocks) tiles of each head and block.
            first: number of the first block.
        """
        low, _unit, group = self.spec.choices[0], self.spec.unit, self.spec.group
        wide = self._tiled(x)
        codes = steps = biases = None
        for bits, count in zip(self.spec.choices, (0, *self.spec.units), strict=True):
            packed = affine_encode(wide, bits, group, x.dtype)
            own = codes_of(packed["w"], bits, self.columns)
            if codes is None or steps is None or biases is None:
                codes, steps, biases = own, packed["s"], packed["b"]
            else:
                chosen = (units == count)[..., None, None]
                codes = mx.where(chosen, own, codes)
                steps = mx.where(chosen, packed["s"], steps)
                biases = mx.where(chosen, packed["b"], biases)
        assert codes is not None
        assert steps is not None
        assert biases is not None
        blocks = units.shape[2]
        numbers = mx.arange(first, first + blocks, dtype=mx.uint32)
        return {
            "w": self._laid(pack(codes & ((1 << low) - 1), low)),
            "s": self._laid(steps),
            "b": self._laid(biases),
            **self._tiles(codes >> low, units, first),
            "n": (numbers << 8) | units.astype(mx.uint32),
        }

    def _tiles(self, above: mx.array, units: mx.array, first: int) -> Packed:
        """Tiles of the codes' upper bits (B, H, blocks, rows, columns)."""
        batch, heads, blocks, rows, columns = above.shape
        unit, most = self.spec.unit, self.spec.units[1]
        place = np.arange(first, first + blocks + 1)
        edges = [self.spec.tiles.after(int(n)) for n in place]
        block = np.repeat(np.arange(blocks), np.diff(edges))
        nth = np.arange(len(block)) - (np.asarray(edges[:-1]) - edges[0])[block]
        plane = mx.arange(most)
        used = plane < units.swapaxes(1, 2)[..., None].astype(mx.int32)
        # Used planes first, head by head: where the nth tile of a block comes from.
        source = mx.argsort(mx.logical_not(used).reshape(batch, blocks, heads * most), axis=-1)
        fits = nth < heads * most
        from_ = source[:, mx.array(block), mx.array(np.where(fits, nth, 0))]
        at = (from_ + mx.array(block * heads * most)).astype(mx.uint32)
        filled = mx.take_along_axis(used.reshape(batch, -1), at, axis=1) & mx.array(
            fits.tolist(), mx.bool_
        )
        head, level = from_ // most, from_ % most
        line = (head * blocks + mx.array(block)).astype(mx.uint32)
        codes = mx.take_along_axis(
            above.reshape(batch, heads * blocks, rows, columns), line[..., None, None], axis=1
        )
        codes = (codes >> (level * unit)[..., None, None].astype(mx.uint32)) & ((1 << unit) - 1)
        codes = mx.where(filled[..., None, None], codes, 0)
        number = mx.array((block + first).astype(np.uint32))
        marks = (number << 16) | (head.astype(mx.uint32) << 8) | level.astype(mx.uint32)
        return {"x": pack(codes, unit), "t": marks}

    def fault(self, packed: Packed) -> str | None:
        """Marks of other blocks than those they lie in, or of heads and planes that are none.

        Room that is not used yet is marked 0.
        """
        marks, numbers = packed["t"], packed["n"]
        _, heads, blocks = numbers.shape
        most = self.spec.units[1]
        edges = [self.spec.tiles.after(i) for i in range(blocks + 1)]
        own = mx.array(np.repeat(np.arange(blocks), np.diff(edges)).astype(np.uint32))
        lost = (marks >> 16 != own) | ((marks >> 8) & 255 >= heads) | (marks & 255 >= most)
        if marks.size and (lost & (marks != 0)).any().item():
            return "array 't' is damaged: tiles belong to no head of their block"
        odd = (numbers >> 8 != mx.arange(blocks, dtype=mx.uint32)) | (numbers & 255 > most)
        if numbers.size and (odd & (numbers != 0)).any().item():
            return "array 'n' is damaged: blocks are not in their order"
        return None

    # ---- reading ------------------------------------------------------------------------

    def _lines(self, packed: Packed) -> tuple[mx.array, mx.array, mx.array]:
        """Head, line (head·blocks + block) and step factor of each tile: (B, tiles)."""
        marks, numbers = packed["t"], packed["n"]
        head, plane = (marks >> 8) & 255, marks & 255
        first = numbers[:, :1, 0] >> 8
        # Tiles of room that is not used yet are zeros; they may lie in any block.
        block = mx.where(marks >> 16 > first, (marks >> 16) - first, 0)
        factor = mx.left_shift(
            mx.array(1 << self.spec.choices[0], mx.uint32), plane * self.spec.unit
        )
        return head, head * numbers.shape[2] + block, factor

    def _tile_steps(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """What one unit of each tile's codes is worth: (B, tiles, rows, groups)."""
        _, line, factor = self._lines(packed)
        steps = mx.take_along_axis(self._steps(packed), line[..., None, None], axis=1)
        return steps.astype(dtype) * factor[..., None, None].astype(dtype)

    def _multiplied(self, a: mx.array, packed: Packed) -> mx.array:
        """Vectors (B, tiles, M, rows) times each tile: (B, tiles, M, columns)."""
        steps = self._tile_steps(packed, a.dtype)
        return mx.quantized_matmul(
            a, packed["x"], steps, mx.zeros_like(steps),
            transpose=False, group_size=self.spec.group, bits=self.spec.unit,
        )  # fmt: skip

    def _upper(self, packed: Packed) -> mx.array:
        """What the tiles add: (B, H·blocks, rows, columns) fp32."""
        batch, heads, blocks = packed["n"].shape
        _, line, _ = self._lines(packed)
        codes = codes_of(packed["x"], self.spec.unit, self.columns).astype(mx.float32)
        steps = mx.repeat(self._tile_steps(packed, mx.float32), self.spec.group, axis=-1)
        out = mx.zeros((batch, heads * blocks, self.rows, self.columns))
        return out.at[mx.arange(batch)[:, None], line].add(codes * steps)

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ."""
        return q @ self.decode(packed, q.dtype).swapaxes(-1, -2)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V."""
        return w @ self.decode(packed, w.dtype)

    def native(self, packed: Packed, start: int, stop: int) -> NativeParts:
        """The base plane, and the tiles spread to whole planes for the time of a step."""
        plain = self.base.native(packed, start, stop)
        if not packed["t"].shape[1]:
            return plain
        batch, heads, blocks = packed["n"].shape
        most, unit = self.spec.units[1], self.spec.unit
        _, line, _ = self._lines(packed)
        at = line * most + (packed["t"] & 255)
        wide = mx.zeros((batch, heads * blocks * most, *packed["x"].shape[2:]), dtype=mx.uint32)
        wide = wide.at[mx.arange(batch)[:, None], at].add(packed["x"])
        wide = wide.reshape(batch, heads, blocks, most, *packed["x"].shape[2:])
        planes = [self._laid(wide[:, :, :, p]) for p in range(most)]
        low = self.spec.choices[0]
        return plain, *(upper_plane(plain, w, unit, low + p * unit) for p, w in enumerate(planes))

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        raise NotImplementedError


class HeadBitsChannelCodec(_HeadBitsCodec):
    """Keys: a block is (D, group); `z` (B, H, blocks, 2) fp32 are sums over all blocks so far."""

    spec: HeadBitsChannelSpec

    def __init__(self, dim: int, spec: HeadBitsChannelSpec) -> None:
        self.base = AffineChannelCodec(dim, spec.base)
        self.rows, self.columns = dim, spec.group
        super().__init__(dim, spec)
        self.axes["z"] = TokenAxis(2, 1, spec.group)

    def encode(self, x: mx.array) -> Packed:
        """Pack the first blocks of a sequence."""
        return self.encode_after(x, {}, 0)

    def encode_after(self, x: mx.array, held: Packed, first: int) -> Packed:
        """Pack (B, H, n, D), block number `first` and the following, behind what is `held`."""
        spec = self.spec
        sums = block_sums(x.astype(mx.float32), spec.group, spec.importance, spec.window, first)
        blocks, since = sums.shape[2], first - first % spec.interval
        if first:
            known = held["z"][:, :, since:first]
            sums = mx.concatenate([held["z"][:, :, first - 1 : first], sums], axis=2)
            sums = mx.cumsum(sums, axis=2)[:, :, 1:]
            every = mx.concatenate([known, sums], axis=2)
        else:
            every = sums = mx.cumsum(sums, axis=2)
        number = np.arange(first, first + blocks)
        chosen = number - number % spec.interval
        seen = every[:, :, mx.array(chosen - since)]
        weight = importance_of(seen, mx.array(chosen + 1), spec.group, spec.importance)
        tiles = np.diff([spec.tiles.after(int(n)) for n in (*number, first + blocks)])
        units = allocate_units(
            weight.swapaxes(1, 2), mx.array(tiles.astype(np.int32)), spec.choices, spec.unit
        )
        return {**self.encode_units(x, units.swapaxes(1, 2), first), "z": sums}

    def _tiled(self, x: mx.array) -> mx.array:
        batch, heads, _n, dim = x.shape
        return x.reshape(batch, heads, -1, self.spec.group, dim).swapaxes(-1, -2)

    def _laid(self, a: mx.array) -> mx.array:
        batch, heads, _, rows, _ = a.shape
        return a.swapaxes(2, 3).reshape(batch, heads, rows, -1)

    def _steps(self, packed: Packed) -> mx.array:
        batch, heads, rows, blocks = packed["s"].shape
        return packed["s"].swapaxes(2, 3).reshape(batch, heads * blocks, rows, 1)

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ: the base plane for all heads, then every tile with the queries of its head."""
        out = self.base.scores(q, packed)
        batch, heads, blocks = packed["n"].shape
        if not packed["t"].shape[1]:
            return out
        head, line, _ = self._lines(packed)
        own = mx.take_along_axis(q, head[..., None, None], axis=1)
        parts = self._multiplied(own, packed)
        rows = q.shape[2]
        by_block = out.reshape(batch, heads, rows, blocks, -1).swapaxes(2, 3)
        by_block = by_block.reshape(batch, heads * blocks, rows, -1)
        by_block = by_block.at[mx.arange(batch)[:, None], line].add(parts)
        by_block = by_block.reshape(batch, heads, blocks, rows, -1).swapaxes(2, 3)
        return by_block.reshape(out.shape)

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        rows = self.base.decode(packed, mx.float32)
        if packed["t"].shape[1]:
            batch, heads, blocks = packed["n"].shape
            upper = self._upper(packed).reshape(batch, heads, blocks, self.rows, self.columns)
            rows = rows + upper.swapaxes(-1, -2).reshape(rows.shape)
        return rows.astype(dtype)


class HeadBitsTokenCodec(_HeadBitsCodec):
    """Values: a block is (group, D in whole groups)."""

    spec: HeadBitsTokenSpec

    def __init__(self, dim: int, spec: HeadBitsTokenSpec) -> None:
        self.base = AffineTokenCodec(dim, spec.base)
        self.rows, self.columns = spec.group, self.base.width
        super().__init__(dim, spec)

    def encode(self, x: mx.array) -> Packed:
        """Pack first blocks in the lowest width."""
        batch, heads, n, _ = x.shape
        return self.encode_units(x, mx.zeros((batch, heads, n // self.spec.group), mx.uint32), 0)

    def _tiled(self, x: mx.array) -> mx.array:
        batch, heads, _, _ = x.shape
        missing = self.columns - self.dim
        if missing:
            x = mx.concatenate([x, mx.repeat(x[..., -1:], missing, axis=-1)], axis=-1)
        return x.reshape(batch, heads, -1, self.spec.group, self.columns)

    def _laid(self, a: mx.array) -> mx.array:
        batch, heads, blocks, rows, _ = a.shape
        return a.reshape(batch, heads, blocks * rows, -1)

    def _steps(self, packed: Packed) -> mx.array:
        batch, heads, blocks = packed["n"].shape
        return packed["s"].reshape(batch, heads * blocks, self.rows, -1)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V: the base plane for all heads, then every tile with the weights of its block."""
        out = self.base.mix(w, packed)
        batch, heads, blocks = packed["n"].shape
        if not packed["t"].shape[1]:
            return out
        head, line, _ = self._lines(packed)
        rows = w.shape[2]
        by_block = w.reshape(batch, heads, rows, blocks, -1).swapaxes(2, 3)
        by_block = by_block.reshape(batch, heads * blocks, rows, -1)
        own = mx.take_along_axis(by_block, line[..., None, None], axis=1)
        parts = self._multiplied(own, packed)[..., : self.dim]
        return out.at[mx.arange(batch)[:, None], head].add(parts)

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        rows = self.base.decode(packed, mx.float32)
        if packed["t"].shape[1]:
            batch, heads, n, _ = rows.shape
            upper = self._upper(packed).reshape(batch, heads, n, self.columns)
            rows = rows + upper[..., : self.dim]
        return rows.astype(dtype)
