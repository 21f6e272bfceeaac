"""Quantizer of vectors in a given eigenbasis, with bits of their own for leading directions.

Source: SpectralQuant (Dynamis-Labs/spectralquant).
"""

import math
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.artifacts import jl_matrix, rotation_matrix
from veloxquant.codebooks.base import CodebookFactory
from veloxquant.codebooks.strategies import check_bits
from veloxquant.core.abstractions import Quantizer
from veloxquant.core.constants import DEFAULT_SEED
from veloxquant.core.context import EncodedVector
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.preconditioners import QJLEncoder
from veloxquant.quantizers.rows import check_dim, narrow, norms, part, query, rows, unit

_NAME = "spectral"
_NORM_BITS = 16


class _Side:
    """Directions [start, stop): one table for unit variance, a norm a vector."""

    def __init__(self, start: int, stop: int, bits: int) -> None:
        check_bits(bits)
        self.start, self.stop, self.bits = start, stop, bits
        self.width = stop - start
        self.table = CodebookFactory.create("gaussian", bits, max(1, self.width))

    def encode(self, z: mx.array, dtype: mx.Dtype) -> EncodedVector:
        """Coordinates divided by their root mean square; the norm makes up for the codes."""
        direction, norm = unit(z[:, self.start : self.stop])
        # The table is for unit vectors: coordinates of variance 1/width.
        indices = self.table.quantize(direction)
        hat = self.table.dequantize(indices)
        inner, square = (direction * hat).sum(-1), mx.square(hat).sum(-1)
        norm = norm * inner / mx.maximum(square, 1e-30)
        return EncodedVector(
            _NAME, z.shape[0], self.width, indices=indices, norm=narrow(norm, dtype)
        )

    def decode(self, ev: EncodedVector) -> mx.array:
        """Coordinates (batch, width) fp32; those of a zero vector are zero."""
        return self.table.dequantize(part(ev, "indices")) * norms(ev)[:, None]


class SpectralQuantizer(Quantizer):
    """`b_signal` bits for the first `d_s` directions and `b_noise` for the others.

    Args:
        d: length of the vectors.
        b_signal: bits of a leading direction.
        b_noise: bits of another direction.
        rotation: (d, d) with eigenvectors in columns, leading ones first; None takes the Haar
            rotation of the seed.
        d_s: number of leading directions, 0 to d.
        apply_qjl: whether a sign sketch corrects inner products for what leading directions lose.
        jl_dim: signs of the sketch; None for as many as leading directions.
        seed: of the rotation and the sketch.

    Raises:
        QuantizerConfigError: for sizes or bits that are not possible, or a rotation that is none.
    """

    def __init__(
        self,
        d: int,
        b_signal: int = 3,
        b_noise: int = 3,
        rotation: np.ndarray | None = None,
        d_s: int = 4,
        apply_qjl: bool = False,
        jl_dim: int | None = None,
        seed: int = DEFAULT_SEED,
    ) -> None:
        check_dim(d)
        if not isinstance(d_s, int) or not 0 <= d_s <= d:
            raise QuantizerConfigError(f"d_s={d_s!r} is not possible; it must be 0 to d={d}")
        if jl_dim is not None and jl_dim < 1:
            raise QuantizerConfigError(f"jl_dim={jl_dim!r} is not possible; it must be at least 1")
        self.d, self.d_s = d, d_s
        self.basis = _columns(rotation, d) if rotation is not None else rotation_matrix(d, seed).T
        self._sides = [
            _Side(start, stop, bits)
            for start, stop, bits in ((0, d_s, b_signal), (d_s, d, b_noise))
            if stop > start
        ]
        self._sketch: QJLEncoder | None = None
        if apply_qjl and d_s:
            self._sketch = QJLEncoder(jl_matrix(d_s, jl_dim or d_s, seed))

    def encode(self, x: Any) -> EncodedVector:
        """Codes of vectors (batch, d): leading directions in `outlier_encoded`, others beside."""
        x, dtype = rows(x, self.d)
        z = x @ self.basis
        coded = {side.start: side.encode(z, dtype) for side in self._sides}
        signal = coded.get(0) if self.d_s else None
        if self._sketch is not None and signal is not None:
            rest = z[:, : self.d_s] - self._sides[0].decode(signal)
            signal.signs, left = self._sketch.encode_key(rest)
            signal.residual_norm = narrow(left, dtype)
        noise = coded.get(self.d_s)
        return EncodedVector(
            _NAME, x.shape[0], self.d, outlier_encoded=signal, inlier_encoded=noise
        )

    def decode(self, ev: EncodedVector) -> mx.array:
        """Vectors (batch, d) in the type that was encoded, without the sketch's part."""
        parts = self._parts(ev)
        z = mx.concatenate(
            [side.decode(coded) for side, coded in zip(self._sides, parts, strict=True)], axis=-1
        )
        return (z @ self.basis.T).astype(part(parts[0], "norm").dtype)

    def estimate_inner_product(self, q: Any, ev: EncodedVector) -> mx.array:
        """Inner products (batch,) of a query (d,), the sketch's part included."""
        q, dtype = query(q, self.d)
        turned, parts = q @ self.basis, self._parts(ev)
        out = mx.zeros((ev.batch_size,))
        for side, coded in zip(self._sides, parts, strict=True):
            out = out + side.decode(coded) @ turned[side.start : side.stop]
        if self._sketch is not None:
            signs, left = part(parts[0], "signs"), norms(parts[0], "residual_norm")
            out = out + self._sketch.estimate_ip(turned[: self.d_s], signs, left)
        return out.astype(dtype)

    def compression_ratio(self) -> float:
        """16-bit bits of a vector over those of its codes, packed, with norms and signs."""
        bits = sum(side.width * side.bits + _NORM_BITS for side in self._sides)
        if self._sketch is not None:
            bits += self._sketch.m + _NORM_BITS
        return 16 * self.d / bits

    def _parts(self, ev: EncodedVector) -> list[EncodedVector]:
        fields = ["outlier_encoded"] * (self.d_s > 0) + ["inlier_encoded"] * (self.d_s < self.d)
        parts: list[Any] = [part(ev, field) for field in fields]
        return parts


def _columns(rotation: Any, d: int) -> mx.array:
    """An orthogonal matrix as it was given, fp32."""
    if isinstance(rotation, mx.array):
        rotation = np.array(rotation.astype(mx.float32))
    matrix = np.asarray(rotation, dtype=np.float64)
    if matrix.shape != (d, d):
        raise QuantizerConfigError(f"rotation of shape {matrix.shape}; it must be ({d}, {d})")
    off = float(np.abs(matrix.T @ matrix - np.eye(d)).max())
    if not off < 1e-2 / math.sqrt(d):
        raise QuantizerConfigError(
            f"rotation is not orthogonal, it is off by {off:.2g}; give eigenvectors in columns"
        )
    return mx.array(matrix.astype(np.float32))
