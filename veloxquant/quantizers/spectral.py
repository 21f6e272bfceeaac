"""Codes in the eigenbasis that a head's vectors were found to have.

Each direction is scaled to unit variance and coded with the Lloyd–Max table; leading directions,
which hold most of the energy, have a bit more. A sign sketch of what the leading directions lose
can make their inner products unbiased.
Source: SpectralQuant (Dynamis-Labs/spectralquant).
"""

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from veloxquant.kernels.native import NativeRun
from veloxquant.quantizers.base import Packed, Shared, TokenAxis
from veloxquant.quantizers.code_table import CodeTable
from veloxquant.quantizers.codebook import TINY, levels_of, narrow, unit_and_norm
from veloxquant.quantizers.rotation import Matrix, rotation
from veloxquant.quantizers.sketch import SignCode, sketch
from veloxquant.quantizers.specs.spectral import SpectralSpec

_ERRORS = (1.0, 0.36338, 0.11748, 0.034548, 0.009501, 0.002505, 0.000644)
"""Squared error of Lloyd–Max codes of N(0, 1) by bits."""
_FLOOR = 1e-4
"""Smallest scale of a direction against the largest: no table has no width."""


class Eigenbasis(NamedTuple):
    """Orthonormal columns by falling variance, (D, D) or (H, D, D), and those variances.

    `variances` (D,) or (H, D) are of unit vectors, so that they sum to one.
    """

    vectors: mx.array
    variances: mx.array


class _Segment(NamedTuple):
    """A range of directions: the name of its words, its table, its scaled basis."""

    name: str
    start: int
    stop: int
    table: CodeTable
    basis: Matrix


class SpectralCodec(Shared):
    """`c0`, `c1`... (B, H, T, words) uint32 a segment, `n` (B, H, T, 1); `z`, `g` with a sketch.

    Without an eigenbasis the directions are those of the seeded rotation, all of one variance.
    """

    def __init__(self, dim: int, spec: SpectralSpec, found: Eigenbasis | None = None) -> None:
        self.dim, self.spec = dim, spec
        if found is not None:
            self.foreign = (found.vectors, found.variances)
        else:
            found = Eigenbasis(rotation(dim, spec.seed).matrix.T, mx.full((dim,), 1 / dim))
        vectors, variances = found.vectors.astype(mx.float32), found.variances.astype(mx.float32)
        scales = mx.sqrt(mx.maximum(variances, 0.0))
        scales = mx.maximum(scales, _FLOOR * scales.max(axis=-1, keepdims=True))
        rows = vectors.swapaxes(-1, -2)
        self.basis = Matrix(rows)
        # (D,) or (H, 1, D), to divide the coordinates of (B, H, n, D).
        self._scales = scales if scales.ndim == 1 else mx.expand_dims(scales, -2)
        scaled = rows * mx.expand_dims(scales, -1)
        self._segments, at = [], 0
        for count, bits in spec.segments:
            if bits:
                table = CodeTable(count, bits, *levels_of(bits, "flat"), scale=1.0)
                part = Matrix(mx.contiguous(scaled[..., at : at + count, :]))
                name = f"c{len(self._segments)}"
                self._segments.append(_Segment(name, at, at + count, table, part))
            at += count
        norms = ("n", "z", "g") if spec.signs else ("n",)
        names = (*(segment.name for segment in self._segments), *norms)
        self.axes = {name: TokenAxis(2) for name in names}
        self._front = spec.segments[0][0]
        self.signs: SignCode | None = None
        if spec.signs:
            projections = sketch(self._front, spec.signs, spec.seed)
            self.signs = SignCode(projections, mx.contiguous(rows[..., : self._front, :]))

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) for any n; every token alone."""
        dtype = narrow(x.dtype)
        unit, norm = unit_and_norm(x)
        z = self.basis.rotate(unit)
        packed: Packed = {}
        hats: list[mx.array] = []
        for segment in self._segments:
            y = (z / self._scales)[..., segment.start : segment.stop]
            codes = segment.table.codes(y)
            packed[segment.name] = segment.table.pack(codes)
            hats.append(segment.table.look_up(codes))
        coded = hats[-1] if len(hats) == 1 else mx.concatenate(hats, axis=-1)
        # Directions without bits are the last ones and stand for zero.
        hat = coded * self._scales[..., : coded.shape[-1]]
        if self.signs is None:
            packed["n"] = (norm * self._correction(z[..., : hat.shape[-1]], hat)).astype(dtype)
            return packed
        rest = (z - mx.pad(hat, _room(hat, self.dim)))[..., : self._front]
        left = mx.sqrt(mx.square(rest).sum(axis=-1, keepdims=True))
        return packed | {
            "n": norm.astype(dtype),
            "z": self.signs.encode(rest),
            "g": (norm * left).astype(dtype),
        }

    def _correction(self, z: mx.array, hat: mx.array) -> mx.array:
        """Factor on the norm: keys keep their product with themselves, values lose least."""
        inner = (z * hat).sum(axis=-1, keepdims=True)
        least = inner / mx.maximum(mx.square(hat).sum(axis=-1, keepdims=True), TINY)
        if not self.spec.unbiased:
            return least
        # A key unlike all that the basis was found from must not grow: twice its length at most.
        return mx.minimum(1 / mx.maximum(inner, TINY), 4 * mx.maximum(least, 0.0))

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Sum of the segments' products, and of the sketch's."""
        out = mx.zeros((), dtype=q.dtype)
        for segment in self._segments:
            turned, words = segment.basis.rotate_query(q), packed[segment.name]
            out = out + segment.table.scores(turned, words, packed["n"])
        return out if self.signs is None else out + self.signs.scores(q, packed["z"], packed["g"])

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Sums in the eigenbasis, each segment mapped back once."""
        out = mx.zeros((), dtype=w.dtype)
        for segment in self._segments:
            words = packed[segment.name]
            out = out + segment.basis.unrotate(segment.table.mix(w, words, packed["n"]))
        return out if self.signs is None else out + self.signs.mix(w, packed["z"], packed["g"])

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D) in the original basis, the sketch's part included."""
        out = mx.zeros((), dtype=mx.float32)
        for segment in self._segments:
            words = packed[segment.name]
            out = out + segment.basis.unrotate(segment.table.rows(words, packed["n"]))
        if self.signs is not None:
            out = out + self.signs.decode(packed["z"], packed["g"])
        return out.astype(dtype)

    def native(self, packed: Packed, start: int, stop: int) -> tuple[NativeRun, ...]:
        """A part for each segment, which add up, and one for the sketch."""
        runs = [
            s.table.native(packed[s.name], packed["n"], start, stop, s.basis, s.table.width)
            for s in self._segments
        ]
        if self.signs is not None:
            runs += self.signs.native(packed["z"], packed["g"], start, stop)
        return tuple(runs)


def pays(variances: np.ndarray, spec_segments: tuple[tuple[int, int], ...], bits: int) -> bool:
    """Whether these widths lose less than `bits` everywhere, by variances (D,) or (H, D)."""
    falling = np.asarray(variances, dtype=np.float64).reshape(-1, np.shape(variances)[-1]).sum(0)
    lost, at = 0.0, 0
    for count, width in spec_segments:
        lost += float(falling[at : at + count].sum()) * _ERRORS[width]
        at += count
    return lost < float(falling.sum()) * _ERRORS[bits]


def _room(x: mx.array, dim: int) -> list[tuple[int, int]]:
    return [(0, 0)] * (x.ndim - 1) + [(0, dim - x.shape[-1])]


def eigenbasis(rows: mx.array) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvectors (H, D, D) and variances (H, D) of unit vectors along rows (H, N, D).

    Uncentred, falling, each vector's largest entry positive; float64 inside. Zero rows do not
    count.
    """
    x = np.array(rows.astype(mx.float32), dtype=np.float64)
    peak = np.abs(x).max(axis=-1, keepdims=True)
    unit = x / np.maximum(peak, TINY)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=-1, keepdims=True), TINY)
    count = np.maximum((peak > 0).sum(axis=-2, keepdims=True), 1)
    moments = np.swapaxes(unit, -1, -2) @ unit / count
    values, vectors = np.linalg.eigh(moments)
    values, vectors = np.maximum(values[..., ::-1], 0), vectors[..., ::-1]
    largest = np.abs(vectors).argmax(axis=-2)[..., None, :]
    vectors = vectors * np.sign(np.take_along_axis(vectors, largest, axis=-2))
    return vectors.astype(np.float32), values.astype(np.float32)
