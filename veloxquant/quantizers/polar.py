"""Recursive polar angles of rotated vectors: a direction as the angles of a binary tree.

Pairs of coordinates become radius and angle, pairs of radii again, up to one radius. Angles are
coded without scale or zero point, since their law at each node is known. Coding compares products
with sines and cosines of the thresholds, decoding takes a polynomial of the code: no angle is ever
computed, and nothing is looked up.
Source: PolarQuant (arXiv 2502.02617), the full recursion of its algorithm 1. Differs: the first
half is paired with the second, not neighbours, which a random rotation makes the same; sizes that
are not powers of two; the radius corrects for what the coded angles lose.
"""

import math

import mlx.core as mx
import numpy as np

from veloxquant.dsa.mlx_pack import pack, unpack
from veloxquant.kernels.native import POLAR, NativeRun
from veloxquant.math.polar_tree import angle_levels, tree
from veloxquant.quantizers.base import Packed, Shared, TokenAxis
from veloxquant.quantizers.codebook import narrow, unit_and_norm
from veloxquant.quantizers.rotation import Orthogonal, rotation
from veloxquant.quantizers.sizes import round_up
from veloxquant.quantizers.specs.polar import PolarSpec

_TILE = 512
_POLYNOMIAL_BITS = 4
NATIVE_BITS = (1, 2, 3, 4, 5, 6, 8)


class PolarCodec(Shared):
    """`w` (B, H, T, words) uint32 and `r` (B, H, T, 1): signs, coded angles, and the radius.

    Words hold the signs of the coordinates, then the codes of all D - 1 angles, leaves first. With
    the signs kept apart every angle lies in [0, π/2].
    """

    def __init__(self, dim: int, spec: PolarSpec, basis: Orthogonal | None = None) -> None:
        self.dim, self.spec = dim, spec
        self.axes = {"w": TokenAxis(2), "r": TokenAxis(2)}
        self.rotation = basis or rotation(dim, spec.seed)
        self._levels = tree(dim)
        count = 1 << spec.bits
        uniform = (np.arange(count) + 0.5) * (math.pi / 2 / count)
        nodes = [pair for level in self._levels for pair in level.sizes]
        angles = np.stack(
            [uniform if a == b == 1 else angle_levels(a, b, spec.bits) for a, b in nodes]
        )
        cuts = ((angles[:, :-1] + angles[:, 1:]) / 2).T
        self._cuts = [(_constant(np.sin(c)), _constant(np.cos(c))) for c in cuts]
        self._table = _constant(_tilted(angles))
        self._powers = [_constant(row) for row in _polynomial(_tilted(angles))]
        self._offsets = mx.arange(len(nodes), dtype=mx.uint32) * count
        powers = _polynomial(_tilted(angles)).astype(np.float32)
        self._coefficients = np.ascontiguousarray(powers) if len(powers) else None
        turns = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
        self._book = _constant(turns)
        """(D - 1, 2^bits, 2): sine and cosine of every coded angle."""
        mx.eval(self._cuts, self._table, self._powers, self._offsets, self._book)

    # ---- coding -------------------------------------------------------------------------

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) for any n; every token alone. The radius is bf16, fp32 for fp32."""
        unit, norm = unit_and_norm(x)
        y = self.rotation.rotate(unit)
        negative, codes = (y < 0).astype(mx.uint8), self._codes(mx.abs(y))
        # Angles keep the norm, so that the decoded direction has length one.
        inner = (y * self._direction(negative, codes)).sum(axis=-1, keepdims=True)
        radius = norm / mx.maximum(inner, 1e-3) if self.spec.unbiased else norm * inner
        words = [_packed(negative, 1), _packed(codes, self.spec.bits)]
        return {"w": mx.concatenate(words, axis=-1), "r": radius.astype(narrow(x.dtype))}

    def _codes(self, radii: mx.array) -> mx.array:
        """Codes of all nodes (..., D - 1) from the coordinates' magnitudes."""
        coded, at = [], 0
        for level in self._levels:
            n = len(level.sizes)
            left, right = radii[..., :n], radii[..., n : 2 * n]
            codes = mx.zeros(left.shape, dtype=mx.uint8)
            for sine, cosine in self._cuts:
                codes = codes + (right * cosine[at : at + n] > left * sine[at : at + n])
            coded.append(codes)
            met = mx.sqrt(left * left + right * right)
            radii = mx.concatenate([met, radii[..., -1:]], axis=-1) if level.carries else met
            at += n
        return coded[0] if len(coded) == 1 else mx.concatenate(coded, axis=-1)

    def _turns(self, codes: mx.array) -> tuple[mx.array, mx.array]:
        """Sines and cosines of coded angles, fp32.

        With p = sin(angle - π/4)/√2 they are √(1/2 - p²) ± p, and p is a polynomial of the code.
        """
        if self.spec.bits > _POLYNOMIAL_BITS:
            p = mx.take(self._table, codes.astype(mx.uint32) + self._offsets)
        else:
            x = codes.astype(mx.float32) * (2 / ((1 << self.spec.bits) - 1)) - 1
            p = self._powers[-1]
            for power in reversed(self._powers[:-1]):
                p = p * x + power
        e = mx.sqrt(0.5 - p * p)
        return e + p, e - p

    def _direction(self, negative: mx.array, codes: mx.array) -> mx.array:
        """Unit vectors (..., D) fp32 in the rotated basis, from the root down."""
        sine, cosine = self._turns(codes)
        radii, at = mx.ones((*codes.shape[:-1], 1), dtype=mx.float32), codes.shape[-1]
        for level in reversed(self._levels):
            n = len(level.sizes)
            at -= n
            met = radii[..., :n]
            parts = [met * cosine[..., at : at + n], met * sine[..., at : at + n]]
            radii = mx.concatenate([*parts, radii[..., n:]] if level.carries else parts, axis=-1)
        return radii * (1 - 2 * negative.astype(mx.float32))

    def directions(self, packed: Packed) -> mx.array:
        """Unit vectors (B, H, T, D) fp32 in the rotated basis."""
        words, first = packed["w"], round_up(self.dim, 32) // 32
        negative = unpack(words[..., :first], 1, self.dim)
        return self._direction(negative, unpack(words[..., first:], self.spec.bits, self.dim - 1))

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D) in the original basis."""
        rows = self.directions(packed) * packed["r"].astype(mx.float32)
        return self.rotation.unrotate(rows).astype(dtype)

    # ---- products -----------------------------------------------------------------------

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Products with rotated queries; keys are never rotated back."""
        turned = self.rotation.rotate_query(q)
        tiles = [
            turned @ self.directions(tile).astype(q.dtype).swapaxes(-1, -2)
            for tile in _tiles(packed)
        ]
        raw = tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=-1)
        return raw * packed["r"].astype(q.dtype).swapaxes(-1, -2)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Sum in the rotated basis, rotated back once."""
        scaled = w * packed["r"].astype(w.dtype).swapaxes(-1, -2)
        out, start = mx.zeros((), dtype=w.dtype), 0
        for tile in _tiles(packed):
            n = tile["r"].shape[2]
            out = out + scaled[..., start : start + n] @ self.directions(tile).astype(w.dtype)
            start += n
        return self.rotation.unrotate(out)

    def native(self, packed: Packed, start: int, stop: int) -> NativeRun | None:
        """Signs and angles for the compiled kernel, in the rotated basis; not at 7 bits."""
        if self.spec.bits not in NATIVE_BITS:
            return None
        return NativeRun(
            POLAR, packed["w"], start, stop, self.dim, self.spec.bits,
            scale=packed["r"], levels=self._coefficients, book=self._book, basis=self.rotation,
        )  # fmt: skip


def _constant(values: np.ndarray) -> mx.array:
    return mx.array(np.asarray(values, dtype=np.float32))


def _tilted(angles: np.ndarray) -> np.ndarray:
    """What `PolarCodec._turns` makes sines and cosines of."""
    return np.sin(angles - math.pi / 4) / math.sqrt(2)


def _polynomial(table: np.ndarray) -> np.ndarray:
    """Coefficients (2^bits, nodes), lowest first, through tables (nodes, 2^bits) of the code.

    The code runs from -1 to 1. Empty where there are too many levels.
    """
    count = table.shape[1]
    if count > 1 << _POLYNOMIAL_BITS:
        return np.zeros((0, len(table)))
    return np.linalg.solve(np.vander(np.linspace(-1, 1, count), increasing=True), table.T)


def _packed(codes: mx.array, bits: int) -> mx.array:
    missing = round_up(codes.shape[-1], 32) - codes.shape[-1]
    if missing:
        codes = mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    return pack(codes, bits)


def _tiles(packed: Packed) -> list[Packed]:
    """Token ranges whose decoded rows stay in the processor's cache."""
    n = packed["r"].shape[2]
    return [
        {name: a[:, :, i : i + _TILE] for name, a in packed.items()} for i in range(0, n, _TILE)
    ]
