"""Rotated scalar codebooks with an embedded refinement bit: the format of turboquant_rvq.

A vector is rotated, divided by its norm and coded coordinate by coordinate with one fixed table.
Codes lie in planes, the refinement bit last, so that it can be dropped. Products with two-bit
codes need no table at all: the four levels are `A·s + B·u` with s, u = ±1, so both planes are read
as 1-bit affine words by one stock product.
Source: TurboQuant (arXiv 2504.19874) with the residual stage derived in `math/lloyd_max.py`.
"""

import math

import mlx.core as mx
import numpy as np

from veloxquant.dsa.mlx_pack import pack, unpack
from veloxquant.kernels import encode
from veloxquant.kernels.native import CODEBOOK, NativeRun, table
from veloxquant.math.lloyd_max import embedded_levels
from veloxquant.quantizers.base import Packed, Shared, TokenAxis
from veloxquant.quantizers.rotation import rotation
from veloxquant.quantizers.sizes import round_up
from veloxquant.quantizers.specs.codebook import CodebookSpec

_TILE = 1024
_TINY = 1e-30


class CodebookCodec(Shared):
    """`w` (B, H, T, words) uint32 and `n` (B, H, T, 1): codes and the norm of each token."""

    def __init__(self, dim: int, spec: CodebookSpec) -> None:
        self.dim, self.spec = dim, spec
        self.axes = {"w": TokenAxis(2), "n": TokenAxis(2)}
        self.rotation = rotation(dim, spec.seed)
        levels, thresholds = embedded_levels(spec.bits)
        self.levels = mx.array(levels, dtype=mx.float32)
        self._thresholds = thresholds
        self._cuts = np.asarray(thresholds, dtype=np.float32)
        self._unit_table = np.asarray(levels, dtype=np.float32)
        self._table = table(levels, 1 / math.sqrt(dim))
        self._lanes = round_up(dim, 32)
        # Sign-plane weights, biggest first: 2 bits are A·s + B·u, 1 bit is c·s.
        if spec.bits == 1:
            self._weights: tuple[float, ...] | None = (levels[1],)
        elif spec.bits == 2:
            self._weights = ((levels[3] + levels[2]) / 2, (levels[3] - levels[2]) / 2)
        else:
            self._weights = None
        total = self._lanes * len(self._weights or ())
        self._group = next((g for g in (128, 64, 32) if total and total % g == 0), 32)
        mx.eval(self.levels)

    # ---- coding -------------------------------------------------------------------------

    def _codes(self, y: mx.array) -> mx.array:
        """Number of thresholds below each coordinate."""
        codes = mx.zeros(y.shape, dtype=mx.uint8)
        for t in self._thresholds:
            codes = codes + (y > t)
        return codes

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) for any n; every token alone. Norms are bf16, or fp32 for fp32 rows."""
        narrow = mx.float32 if x.dtype == mx.float32 else mx.bfloat16
        coded = encode.rotated(
            x, bits=self.spec.bits, unbiased=self.spec.unbiased, signs=self.rotation.signs,
            thresholds=self._cuts, levels=self._unit_table,
        )  # fmt: skip
        if coded is not None:
            return {"w": coded[0], "n": coded[1].astype(narrow)}
        x32 = x.astype(mx.float32)
        # Two steps, so that squares of large coordinates stay finite.
        peak = mx.maximum(mx.abs(x32).max(axis=-1, keepdims=True), _TINY)
        unit = x32 / peak
        length = mx.sqrt(mx.square(unit).sum(axis=-1, keepdims=True))
        unit = unit / mx.maximum(length, _TINY)
        y = self.rotation.rotate(unit) * math.sqrt(self.dim)
        codes = self._codes(y)
        norm = peak * length * self._correction(y, codes)
        norm = mx.where(peak > _TINY, norm, 0.0)
        if self._lanes > self.dim:
            codes = mx.pad(codes, [(0, 0)] * 3 + [(0, self._lanes - self.dim)])
        if self.spec.bits == 1:
            words = pack(codes, 1)
        else:
            words = mx.concatenate(
                [
                    pack((codes >> shift) & ((1 << width) - 1), width)
                    for width, shift in self.spec.planes()
                ],
                axis=-1,
            )
        return {"w": words, "n": norm.astype(narrow)}

    def _correction(self, y: mx.array, codes: mx.array) -> mx.array:
        """Factor on the norm: unbiased products for keys, least squared error for values."""
        hat = mx.take(self.levels, codes.astype(mx.uint32))
        inner = (y * hat).sum(axis=-1, keepdims=True)
        if self.spec.unbiased:
            return self.dim / mx.maximum(inner, 1e-6 * self.dim)
        return inner / mx.maximum(mx.square(hat).sum(axis=-1, keepdims=True), _TINY)

    def rotated(self, packed: Packed) -> mx.array:
        """Levels in the rotated basis, without norms: (B, H, T, D) fp32."""
        words, start = packed["w"], 0
        codes = mx.zeros((), dtype=mx.uint32)
        for width, shift in self.spec.planes():
            stop = start + self._lanes * width // 32
            codes = codes | (unpack(words[..., start:stop], width, self._lanes) << shift)
            start = stop
        return mx.take(self.levels, codes[..., : self.dim])

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D) in the original basis."""
        scale = packed["n"].astype(mx.float32) / math.sqrt(self.dim)
        return self.rotation.unrotate(self.rotated(packed) * scale).astype(dtype)

    # ---- products -----------------------------------------------------------------------

    def _planes(self, packed: Packed, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
        shape = (*packed["w"].shape[:-1], packed["w"].shape[-1] * 32 // self._group)
        two = mx.broadcast_to(mx.array(2.0, dtype=dtype), shape)
        return packed["w"], two, mx.broadcast_to(mx.array(-1.0, dtype=dtype), shape)

    def _lane_pad(self, x: mx.array) -> mx.array:
        missing = self._lanes - self.dim
        return x if missing == 0 else mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Products with rotated queries; keys are never rotated back."""
        rotated = self.rotation.rotate_query(q) * (1 / math.sqrt(self.dim))
        if self._weights is not None:
            wide = mx.concatenate([self._lane_pad(rotated * w) for w in self._weights], axis=-1)
            raw = mx.quantized_matmul(
                wide, *self._planes(packed, q.dtype),
                transpose=True, group_size=self._group, bits=1,
            )  # fmt: skip
        else:
            tiles = [
                rotated @ self.rotated(tile).astype(q.dtype).swapaxes(-1, -2)
                for tile in self._tiles(packed)
            ]
            raw = tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=-1)
        return raw * packed["n"].astype(q.dtype).swapaxes(-1, -2)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Sum in the rotated basis, rotated back once."""
        scaled = w * (packed["n"].astype(w.dtype) / math.sqrt(self.dim)).swapaxes(-1, -2)
        if self._weights is not None:
            wide = mx.quantized_matmul(
                scaled, *self._planes(packed, w.dtype),
                transpose=False, group_size=self._group, bits=1,
            )  # fmt: skip
            parts = mx.split(wide, len(self._weights), axis=-1)
            out = sum(
                (p[..., : self.dim] * c for p, c in zip(parts, self._weights, strict=True)),
                start=mx.zeros((), dtype=w.dtype),
            )
        else:
            out, start = mx.zeros((), dtype=w.dtype), 0
            for tile in self._tiles(packed):
                n = tile["n"].shape[2]
                out = out + scaled[..., start : start + n] @ self.rotated(tile).astype(w.dtype)
                start += n
        return self.rotation.unrotate(out)

    def native(self, packed: Packed, start: int, stop: int) -> NativeRun:
        """How the compiled kernel reads these rows: queries and sums are in the rotated basis."""
        return NativeRun(
            CODEBOOK, packed["w"], start, stop, self._lanes, self.spec.bits,
            scale=packed["n"], levels=self._table,
            basis=self.rotation,
        )  # fmt: skip

    def _tiles(self, packed: Packed) -> list[Packed]:
        """Token ranges small enough that their decoded rows stay in cache."""
        n = packed["n"].shape[2]
        return [
            {name: a[:, :, i : i + _TILE] for name, a in packed.items()} for i in range(0, n, _TILE)
        ]
