"""Recursive polar angles of rotated vectors: a direction as the angles of a binary tree.

Pairs of coordinates become radius and angle, pairs of radii again, up to one radius. Angles are
coded without scale or zero point, since their law at each node is known; coding compares products
with sines and cosines of the thresholds, so that no angle is ever computed.
Source: PolarQuant (arXiv 2502.02617), the full recursion of its algorithm 1. Differs: sizes that
are not powers of two, and the radius corrects for what the coded angles lose.
"""

import math

import mlx.core as mx
import numpy as np

from veloxquant.dsa.mlx_pack import pack, unpack
from veloxquant.math.polar_tree import angle_levels, tree
from veloxquant.quantizers.base import Packed, Shared, TokenAxis
from veloxquant.quantizers.codebook import narrow, unit_and_norm
from veloxquant.quantizers.rotation import Orthogonal, rotation
from veloxquant.quantizers.sizes import round_up
from veloxquant.quantizers.specs.polar import CIRCLE_BITS, PolarSpec

_TILE = 512


def _planes(bits: int) -> tuple[tuple[int, int], ...]:
    """Width and shift of what is packed; MLX unpacks every width up to 8 but 7."""
    return ((4, 3), (3, 0)) if bits == 7 else ((bits, 0),)


class PolarCodec(Shared):
    """`w` (B, H, T, words) uint32 and `r` (B, H, T, 1): coded angles and the radius."""

    def __init__(self, dim: int, spec: PolarSpec, basis: Orthogonal | None = None) -> None:
        self.dim, self.spec = dim, spec
        self.axes = {"w": TokenAxis(2), "r": TokenAxis(2)}
        self.rotation = basis or rotation(dim, spec.seed)
        self._levels = tree(dim)
        self._circle = 1 << (spec.bits + CIRCLE_BITS)
        sectors = (np.arange(self._circle) + 0.5) * (2 * math.pi / self._circle)
        nodes = [pair for level in self._levels[1:] for pair in level.sizes]
        angles = np.stack([angle_levels(*pair, spec.bits) for pair in nodes] or [np.zeros(0)])
        cuts = (angles[:, :-1] + angles[:, 1:]) / 2
        self._cuts = [_sine_and_cosine(c) for c in cuts.T]
        quarter = np.arange(1, self._circle // 4) * (2 * math.pi / self._circle)
        self._quarter_cuts = [(math.sin(t), math.cos(t)) for t in quarter]
        self._sectors = _sine_and_cosine(sectors)
        self._angles = _sine_and_cosine(angles.ravel())
        self._offsets = mx.arange(len(nodes), dtype=mx.uint32) * (1 << spec.bits)
        mx.eval(self._cuts, self._sectors, self._angles, self._offsets)

    # ---- coding -------------------------------------------------------------------------

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) for any n; every token alone. The radius is bf16, fp32 for fp32."""
        unit, norm = unit_and_norm(x)
        y = self.rotation.rotate(unit)
        circle, upper = self._codes(y)
        # Angles keep the norm, so that the decoded direction has length one.
        inner = (y * self._direction(circle, upper)).sum(axis=-1, keepdims=True)
        radius = norm / mx.maximum(inner, 1e-3) if self.spec.unbiased else norm * inner
        words = [self._packed(circle, self.spec.bits + CIRCLE_BITS)]
        if upper.shape[-1]:
            words.append(self._packed(upper, self.spec.bits))
        return {
            "w": mx.concatenate(words, axis=-1),
            "r": radius.astype(narrow(x.dtype)),
        }

    def _codes(self, y: mx.array) -> tuple[mx.array, mx.array]:
        """Codes between coordinates (..., D/2) and of all upper nodes (..., D/2 - 1)."""
        left, right = y[..., 0::2], y[..., 1::2]
        u, v = mx.abs(left), mx.abs(right)
        turn = mx.zeros(u.shape, dtype=mx.uint32)
        for sine, cosine in self._quarter_cuts:
            turn = turn + (v * cosine > u * sine)
        half, full = self._circle // 2, self._circle
        west, south = left < 0, right < 0
        upper_half = mx.where(west, half - 1 - turn, turn)
        lower_half = mx.where(west, half + turn, full - 1 - turn)
        circle = mx.where(south, lower_half, upper_half)
        radii, coded, at = mx.sqrt(u * u + v * v), [], 0
        for level in self._levels[1:]:
            n = len(level.sizes)
            left, right = radii[..., 0 : 2 * n : 2], radii[..., 1 : 2 * n : 2]
            codes = mx.zeros(left.shape, dtype=mx.uint32)
            for sine, cosine in self._cuts:
                codes = codes + (right * cosine[at : at + n] > left * sine[at : at + n])
            coded.append(codes)
            met = mx.sqrt(left * left + right * right)
            radii = mx.concatenate([met, radii[..., -1:]], axis=-1) if level.carries else met
            at += n
        if not coded:
            return circle, circle[..., :0]
        return circle, mx.concatenate(coded, axis=-1)

    def _packed(self, codes: mx.array, bits: int) -> mx.array:
        missing = round_up(codes.shape[-1], 32) - codes.shape[-1]
        if missing:
            codes = mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
        parts = [pack((codes >> at) & ((1 << width) - 1), width) for width, at in _planes(bits)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def _unpacked(self, words: mx.array) -> tuple[mx.array, mx.array]:
        """Codes as `_codes` gives them."""
        pairs, first = self.dim // 2, self.spec.words(self.dim)[0]
        circle, start = mx.zeros((), dtype=mx.uint32), 0
        for width, at in _planes(self.spec.bits + CIRCLE_BITS):
            stop = start + round_up(pairs, 32) * width // 32
            circle = circle | (unpack(words[..., start:stop], width, pairs) << at)
            start = stop
        if pairs == 1:
            return circle, circle[..., :0]
        return circle, unpack(words[..., first:], self.spec.bits, pairs - 1)

    def _turns(
        self, circle: mx.array, upper: mx.array
    ) -> tuple[tuple[mx.array, mx.array], tuple[mx.array, mx.array]]:
        """Sines and cosines of the coded angles, between coordinates and of upper nodes."""
        index = upper + self._offsets
        return (
            (mx.take(self._sectors[0], circle), mx.take(self._sectors[1], circle)),
            (mx.take(self._angles[0], index), mx.take(self._angles[1], index)),
        )

    def _direction(self, circle: mx.array, upper: mx.array) -> mx.array:
        """Unit vectors (..., D) fp32 in the rotated basis, from the root down."""
        (low_sine, low_cosine), (sine, cosine) = self._turns(circle, upper)
        radii = mx.ones((*low_sine.shape[:-1], 1), dtype=mx.float32)
        at = sine.shape[-1]
        for level in reversed(self._levels[1:]):
            n = len(level.sizes)
            at -= n
            wide = _spread(radii[..., :n], sine[..., at : at + n], cosine[..., at : at + n])
            radii = mx.concatenate([wide, radii[..., -1:]], axis=-1) if level.carries else wide
        return _spread(radii, low_sine, low_cosine)

    def directions(self, packed: Packed) -> mx.array:
        """Unit vectors (B, H, T, D) fp32 in the rotated basis."""
        return self._direction(*self._unpacked(packed["w"]))

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D) in the original basis."""
        rows = self.directions(packed) * packed["r"].astype(mx.float32)
        return self.rotation.unrotate(rows).astype(dtype)

    # ---- products -----------------------------------------------------------------------

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Products with rotated queries; a single query is folded up the tree instead."""
        turned = self.rotation.rotate_query(q)
        tiles = [
            self._folded(turned, tile) if q.shape[2] == 1
            else turned @ self.directions(tile).astype(q.dtype).swapaxes(-1, -2)
            for tile in _tiles(packed)
        ]  # fmt: skip
        raw = tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=-1)
        return raw * packed["r"].astype(q.dtype).swapaxes(-1, -2)

    def _folded(self, q: mx.array, packed: Packed) -> mx.array:
        """Products of rotated queries (B, H, 1, D) with unit vectors, without making those."""
        (low_sine, low_cosine), (sine, cosine) = self._turns(*self._unpacked(packed["w"]))
        sums = q[..., 0::2] * low_cosine + q[..., 1::2] * low_sine
        at = 0
        for level in self._levels[1:]:
            n = len(level.sizes)
            s, c = sine[..., at : at + n], cosine[..., at : at + n]
            met = sums[..., 0 : 2 * n : 2] * c + sums[..., 1 : 2 * n : 2] * s
            sums = mx.concatenate([met, sums[..., -1:]], axis=-1) if level.carries else met
            at += n
        return sums.astype(q.dtype).swapaxes(-1, -2)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Sum in the rotated basis, rotated back once."""
        scaled = w * packed["r"].astype(w.dtype).swapaxes(-1, -2)
        out, start = mx.zeros((), dtype=w.dtype), 0
        for tile in _tiles(packed):
            n = tile["r"].shape[2]
            out = out + scaled[..., start : start + n] @ self.directions(tile).astype(w.dtype)
            start += n
        return self.rotation.unrotate(out)

    def native(self, packed: Packed, start: int, stop: int) -> None:
        """The compiled kernel has no such form."""
        del packed, start, stop


def _spread(radii: mx.array, sine: mx.array, cosine: mx.array) -> mx.array:
    """Radii (..., n) and their angles to the 2n radii or coordinates one level down."""
    wide = mx.stack([radii * cosine, radii * sine], axis=-1)
    return wide.reshape(*sine.shape[:-1], 2 * sine.shape[-1])


def _sine_and_cosine(angles: np.ndarray) -> tuple[mx.array, mx.array]:
    return mx.array(np.sin(angles).astype(np.float32)), mx.array(np.cos(angles).astype(np.float32))


def _tiles(packed: Packed) -> list[Packed]:
    """Token ranges whose decoded rows stay in the processor's cache."""
    n = packed["r"].shape[2]
    return [
        {name: a[:, :, i : i + _TILE] for name, a in packed.items()} for i in range(0, n, _TILE)
    ]
