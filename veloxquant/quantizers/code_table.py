"""Scalar codes of a few channels: packing into planes of bits, levels, products with packed codes.

Codes lie in planes, high bits first, so that the last can be dropped. Products with codes of one
or two bits need no table: four symmetric levels are `A·s + B·u` with s, u = ±1, so both planes are
read as 1-bit affine words by one stock product. Wider codes are looked up tile by tile.
"""

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from veloxquant.dsa.mlx_pack import pack, unpack
from veloxquant.kernels.native import CODEBOOK, Basis, NativeRun, table
from veloxquant.quantizers.sizes import round_up
from veloxquant.quantizers.specs.codebook import bit_planes

_TILE = 1024


class CodeTable:
    """Codes of `width` channels with one ascending, symmetric table of 2^bits levels.

    A packed token is `words` uint32 and stands for `levels·scale` times a factor of its own, which
    callers pass as `norm` (B, H, T, 1).
    """

    def __init__(
        self,
        width: int,
        bits: int,
        levels: Sequence[float],
        thresholds: Sequence[float],
        scale: float,
    ) -> None:
        self.width, self.bits, self.scale = width, bits, scale
        self.lanes = round_up(width, 32)
        self.words = self.lanes * bits // 32
        self.levels = mx.array(list(levels), dtype=mx.float32)
        self.thresholds = tuple(thresholds)
        self.cuts = np.asarray(thresholds, dtype=np.float32)
        self.unit_table = np.asarray(levels, dtype=np.float32)
        self._native = table(levels, scale)
        # Sign-plane weights, biggest first: 2 bits are A·s + B·u, 1 bit is c·s.
        self._weights: tuple[float, ...] | None = None
        if bits == 1:
            self._weights = (levels[1],)
        elif bits == 2:
            self._weights = ((levels[3] + levels[2]) / 2, (levels[3] - levels[2]) / 2)
        total = self.lanes * len(self._weights or ())
        self._group = next((g for g in (128, 64, 32) if total and total % g == 0), 32)
        mx.eval(self.levels)

    # ---- coding -------------------------------------------------------------------------

    def codes(self, y: mx.array) -> mx.array:
        """Number of thresholds below each element of (..., width): uint8."""
        codes = mx.zeros(y.shape, dtype=mx.uint8)
        for t in self.thresholds:
            codes = codes + (y > t)
        return codes

    def look_up(self, codes: mx.array) -> mx.array:
        """Levels of codes, fp32, without scale."""
        return mx.take(self.levels, codes.astype(mx.uint32))

    def pack(self, codes: mx.array) -> mx.array:
        """Codes (..., width) to words (..., words)."""
        if self.lanes > self.width:
            room = [(0, 0)] * (codes.ndim - 1) + [(0, self.lanes - self.width)]
            codes = mx.pad(codes, room)
        if self.bits == 1:
            return pack(codes, 1)
        planes = [
            pack((codes >> shift) & ((1 << width) - 1), width)
            for width, shift in bit_planes(self.bits)
        ]
        return mx.concatenate(planes, axis=-1)

    def unpack(self, words: mx.array) -> mx.array:
        """Words (..., words) to levels (..., width) fp32, without scale."""
        codes, start = mx.zeros((), dtype=mx.uint32), 0
        for width, shift in bit_planes(self.bits):
            stop = start + self.lanes * width // 32
            codes = codes | (unpack(words[..., start:stop], width, self.lanes) << shift)
            start = stop
        return mx.take(self.levels, codes[..., : self.width])

    # ---- products -----------------------------------------------------------------------

    def scores(self, q: mx.array, words: mx.array, norm: mx.array) -> mx.array:
        """Products of queries (B, H, M, width), in the coded basis, with all T tokens."""
        q = q * self.scale
        if self._weights is not None:
            wide = mx.concatenate([self._lane_pad(q * w) for w in self._weights], axis=-1)
            raw = mx.quantized_matmul(
                wide, words, *self._ones(words, q.dtype),
                transpose=True, group_size=self._group, bits=1,
            )  # fmt: skip
        else:
            tiles = [
                q @ self.unpack(words[:, :, i:j]).astype(q.dtype).swapaxes(-1, -2)
                for i, j in _tiles(words)
            ]
            raw = tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=-1)
        return raw * norm.astype(q.dtype).swapaxes(-1, -2)

    def mix(self, w: mx.array, words: mx.array, norm: mx.array) -> mx.array:
        """Weighted sums (B, H, M, width) of all T tokens, in the coded basis."""
        scaled = w * (norm.astype(w.dtype) * self.scale).swapaxes(-1, -2)
        if self._weights is not None:
            wide = mx.quantized_matmul(
                scaled, words, *self._ones(words, w.dtype),
                transpose=False, group_size=self._group, bits=1,
            )  # fmt: skip
            parts = mx.split(wide, len(self._weights), axis=-1)
            return sum(
                (p[..., : self.width] * c for p, c in zip(parts, self._weights, strict=True)),
                start=mx.zeros((), dtype=w.dtype),
            )
        out = mx.zeros((), dtype=w.dtype)
        for i, j in _tiles(words):
            out = out + scaled[..., i:j] @ self.unpack(words[:, :, i:j]).astype(w.dtype)
        return out

    def rows(self, words: mx.array, norm: mx.array) -> mx.array:
        """Decoded rows (B, H, T, width) in the coded basis, fp32."""
        return self.unpack(words) * (norm.astype(mx.float32) * self.scale)

    def native(
        self,
        words: mx.array,
        norm: mx.array,
        start: int,
        stop: int,
        basis: Basis | None,
        dim: int | None = None,
    ) -> NativeRun:
        """How the compiled kernel reads these tokens."""
        return NativeRun(
            CODEBOOK, words, start, stop, self.lanes, self.bits,
            scale=norm, levels=self._native, basis=basis, dim=dim,
        )  # fmt: skip

    def _ones(self, words: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Scales 2 and biases -1 for every group, which hold nothing: bits become ±1."""
        shape = (*words.shape[:-1], words.shape[-1] * 32 // self._group)
        two, one = mx.array(2.0, dtype=dtype), mx.array(-1.0, dtype=dtype)
        return mx.broadcast_to(two, shape), mx.broadcast_to(one, shape)

    def _lane_pad(self, x: mx.array) -> mx.array:
        missing = self.lanes - self.width
        return x if missing == 0 else mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def _tiles(words: mx.array) -> Iterator[tuple[int, int]]:
    """Token ranges small enough that their decoded rows stay in the processor's cache."""
    n = words.shape[2]
    return ((i, min(i + _TILE, n)) for i in range(0, n, _TILE))
