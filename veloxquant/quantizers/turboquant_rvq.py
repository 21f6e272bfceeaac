"""Quantizer of rotated coordinates in two stages of `b` bits: a table, and one for what is left.

The cache method of this name spends its bits in one table with an embedded refinement bit, see
`quantizers/codebook.py`; this is the documented stand-alone form with two code streams.
Source: derived from TurboQuant (arXiv 2504.19874).
"""

import math
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.codebooks.adaptive_codebook import lloyd_on_bins
from veloxquant.codebooks.scalar_codebook import ScalarCodebook
from veloxquant.core.abstractions import ArtifactStore, Quantizer
from veloxquant.core.constants import DEFAULT_SEED
from veloxquant.core.context import EncodedVector
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.core.registry import QuantizerRegistry
from veloxquant.dsa.mlx_pack import WORD, pack, unpack
from veloxquant.math.distributions import gaussian_pdf
from veloxquant.math.lloyd_max import normal_levels
from veloxquant.quantizers.rows import check_dim, narrow, norms, part, query, rows, unit
from veloxquant.quantizers.sizes import round_up
from veloxquant.quantizers.turboquant_mse import seeded_rotation, stored_codebook

MAX_STAGE_BITS = 4
"""Both stages of a coordinate share one uint8 index."""
_EDGE = 8.0


@lru_cache(maxsize=8)
def residual_levels(b: int) -> tuple[float, ...]:
    """Good 2^b levels for what a 2^b-level table leaves of N(0, 1), the same for all its cells.

    Inner cells leave little, outer ones have tails: the error has several minima, so the best of
    several starts is taken.
    """
    levels = np.asarray(normal_levels(b))
    cuts = np.concatenate([[-_EDGE], (levels[:-1] + levels[1:]) / 2, [_EDGE]])
    reach = _EDGE - levels[-1]
    r = np.linspace(-reach, reach, 20_001)
    x = r[:, None] + levels
    inside = (x > cuts[:-1]) & (x <= cuts[1:])
    weight = np.where(inside, gaussian_pdf(x), 0.0).sum(axis=-1)
    weight = (weight + weight[::-1]) / 2
    found = [
        lloyd_on_bins(levels * scale, weight, weight * r) for scale in np.arange(0.05, 0.65, 0.05)
    ]

    def error(table: np.ndarray) -> float:
        cell = np.searchsorted((table[:-1] + table[1:]) / 2, r)
        return float((weight * np.square(r - table[cell])).sum())

    best = min(found, key=error)
    return tuple(map(float, (best - best[::-1]) / 2))


@QuantizerRegistry.register("turboquant_rvq")
class TurboQuantRVQ(Quantizer):
    """2·b bits a coordinate and a norm.

    `residual_scale` sets the spread of the second table in units of a coordinate's standard
    deviation (a scaled Gaussian table); without it the table is fitted to what the first leaves.
    """

    def __init__(
        self,
        d: int,
        b: int = 2,
        seed: int = DEFAULT_SEED,
        m: int = 0,
        store: ArtifactStore | None = None,
        use_hadamard: bool = False,
        residual_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        del m, kwargs  # one signature for all quantizers
        check_dim(d)
        if not isinstance(b, int) or not 1 <= b <= MAX_STAGE_BITS:
            raise QuantizerConfigError(f"b={b!r}; each stage has 1 to {MAX_STAGE_BITS} bits")
        if residual_scale is not None and not 0 < residual_scale < math.inf:
            raise QuantizerConfigError(f"residual_scale={residual_scale!r} must be above 0")
        self.d, self.b, self.seed = d, b, seed
        self.rotation = seeded_rotation(d, seed, store, use_hadamard=use_hadamard)
        self.codebook = stored_codebook("gaussian", b, d, store)
        unit_levels = (
            np.asarray(residual_levels(b))
            if residual_scale is None
            else np.asarray(normal_levels(b)) * residual_scale
        )
        self.residual_codebook = ScalarCodebook(unit_levels / math.sqrt(d))
        self._lanes = round_up(d, WORD)

    @property
    def supports_fused_decode(self) -> bool:
        """Whether a kernel attends to the two streams: none does, caches have another format."""
        return False

    def _codes(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        direction, norm = unit(x)
        rotated = self.rotation.apply(direction)
        first = self.codebook.quantize(rotated)
        second = self.residual_codebook.quantize(rotated - self.codebook.dequantize(first))
        return first, second, norm

    def _vectors(self, first: mx.array, second: mx.array, norm: mx.array) -> mx.array:
        """Vectors in the rotated basis."""
        unit_rows = self.codebook.dequantize(first) + self.residual_codebook.dequantize(second)
        return unit_rows * norm.astype(mx.float32)[..., None]

    def encode(self, x: Any) -> EncodedVector:
        """Indices (batch, d) uint8, the first stage in the upper bits, and norms."""
        x, dtype = rows(x, self.d)
        first, second, norm = self._codes(x)
        indices = (first << self.b) | second
        return EncodedVector(
            "turboquant_rvq", x.shape[0], self.d, indices=indices, norm=narrow(norm, dtype)
        )

    def _rotated(self, ev: EncodedVector) -> mx.array:
        indices = part(ev, "indices")
        return self._vectors(indices >> self.b, indices & ((1 << self.b) - 1), norms(ev))

    def decode(self, ev: EncodedVector) -> mx.array:
        """Vectors (batch, d) in the type they came in."""
        return self.rotation.apply_inverse(self._rotated(ev)).astype(part(ev, "norm").dtype)

    def estimate_inner_product(self, q: Any, ev: EncodedVector) -> mx.array:
        """Inner products (batch,) with the decoded vectors, computed in the rotated basis."""
        q, dtype = query(q, self.d)
        return (self._rotated(ev) @ self.rotation.apply(q)).astype(dtype)

    def encode_pack(self, x: Any) -> tuple[tuple[mx.array, mx.array], mx.array]:
        """Both stages packed, ((batch, words) uint32 each), and norms (batch,)."""
        x, dtype = rows(x, self.d)
        *codes, norm = self._codes(x)
        room = [(0, 0), (0, self._lanes - self.d)]
        first, second = (pack(mx.pad(c, room) if room[1][1] else c, self.b) for c in codes)
        return (first, second), narrow(norm, dtype)

    def decode_packed(
        self, packed1: Any, packed2: Any, norms: Any, seq_len: int | None = None
    ) -> mx.array:
        """Vectors (..., n, d) of what `encode_pack` made.

        Args:
            packed1: first stage (..., n, words).
            packed2: second stage, the same shape.
            norms: (..., n).
            seq_len: rows in use, of buffers that have room for more.
        """
        if seq_len is not None:
            packed1, packed2 = packed1[..., :seq_len, :], packed2[..., :seq_len, :]
            norms = norms[..., :seq_len]
        first, second = (unpack(p, self.b, self._lanes)[..., : self.d] for p in (packed1, packed2))
        whole = self._vectors(first, second, norms)
        return self.rotation.apply_inverse(whole).astype(norms.dtype)
