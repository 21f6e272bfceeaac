"""Quantizer of vectors in a given eigenbasis: leading directions and the rest coded apart.

The cache method of this name has a format of its own, see `quantizers/spectral.py`.
Source: SpectralQuant (Dynamis-Labs/spectralquant).
"""

from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.artifacts import jl_matrix, rotation_matrix
from veloxquant.codebooks.base import CodebookFactory
from veloxquant.codebooks.scalar_codebook import ScalarCodebook
from veloxquant.core.abstractions import Quantizer
from veloxquant.core.constants import DEFAULT_SEED
from veloxquant.core.context import EncodedVector
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.preconditioners import QJLEncoder, RotationPreconditioner
from veloxquant.quantizers.rows import check_dim, narrow, norms, part, query, rows, unit

_BETA_FROM = 3
"""Length from which coordinates on a sphere have a density that a table can be fitted to."""


class SpectralQuantizer(Quantizer):
    """Directions `rotation` (d, d) in columns; the first `d_s` have their own bits.

    Both parts are coded as a length and a direction, so any spectrum is coded alike. With
    `apply_qjl` the residual of the first part is sketched with `jl_dim` signs, which makes its
    inner products unbiased and noisier. Without a rotation the seeded random one is used.
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
        if not 1 <= d_s < d:
            raise QuantizerConfigError(f"d_s={d_s!r} must be from 1 to {d - 1}")
        self.d, self.d_s, self.seed = d, d_s, seed
        matrix = rotation_matrix(d, seed).T if rotation is None else mx.array(np.asarray(rotation))
        if matrix.shape != (d, d):
            raise QuantizerConfigError(f"rotation of shape {matrix.shape}; it must be ({d}, {d})")
        self.rotation = RotationPreconditioner(matrix.T)
        self.signal, self.noise = _table(b_signal, d_s), _table(b_noise, d - d_s)
        self._encoder: QJLEncoder | None = None
        if apply_qjl:
            width = d_s if jl_dim is None else jl_dim
            if width < 1:
                raise QuantizerConfigError(f"jl_dim={jl_dim!r} must be at least 1")
            self._encoder = QJLEncoder(jl_matrix(d_s, width, seed + 2))

    def encode(self, x: Any) -> EncodedVector:
        """Indices (batch, d) uint8, the norm, and the length of the leading part."""
        x, dtype = rows(x, self.d)
        direction, norm = unit(x)
        z = self.rotation.apply(direction)
        head, length = unit(z[:, : self.d_s])
        tail, _ = unit(z[:, self.d_s :])
        codes = [self.signal.quantize(head), self.noise.quantize(tail)]
        ev = EncodedVector(
            "spectral", x.shape[0], self.d, indices=mx.concatenate(codes, axis=1),
            norm=narrow(norm, dtype), final_radius=length.astype(mx.float16),
        )  # fmt: skip
        if self._encoder is not None:
            residual = z[:, : self.d_s] - self._head(ev)
            signs, left = self._encoder.encode_key(residual)
            ev.signs, ev.residual_norm = signs, left.astype(mx.float16)
        return ev

    def _head(self, ev: EncodedVector) -> mx.array:
        codes = part(ev, "indices")[:, : self.d_s]
        return self.signal.dequantize(codes) * norms(ev, "final_radius")[:, None]

    def _rotated(self, ev: EncodedVector) -> mx.array:
        """Unit vectors in the eigenbasis."""
        length = norms(ev, "final_radius")
        rest = mx.sqrt(mx.maximum(1 - mx.square(length), 0.0))
        tail = self.noise.dequantize(part(ev, "indices")[:, self.d_s :]) * rest[:, None]
        return mx.concatenate([self._head(ev), tail], axis=1)

    def decode(self, ev: EncodedVector) -> mx.array:
        """Vectors (batch, d) in the type they came in; the sketch is left out."""
        whole = self.rotation.apply_inverse(self._rotated(ev) * norms(ev)[:, None])
        return whole.astype(part(ev, "norm").dtype)

    def estimate_inner_product(self, q: Any, ev: EncodedVector) -> mx.array:
        """Inner products (batch,), with what the sketch knows about the leading part."""
        q, dtype = query(q, self.d)
        z = self.rotation.apply(q)
        out = self._rotated(ev) @ z
        if self._encoder is not None:
            signs, left = part(ev, "signs"), norms(ev, "residual_norm")
            out = out + self._encoder.estimate_ip(z[: self.d_s], signs, left)
        return (out * norms(ev)).astype(dtype)

    def compression_ratio(self) -> float:
        """Bytes of an fp16 vector over those of an encoded one as held, a byte an index."""
        sketched = 0 if self._encoder is None else self._encoder.m + 2
        return 2 * self.d / (self.d + 4 + sketched)


def _table(b: int, d: int) -> ScalarCodebook:
    """For the coordinates of a unit vector of length `d`."""
    return CodebookFactory.create("beta" if d >= _BETA_FROM else "gaussian", b, d)
