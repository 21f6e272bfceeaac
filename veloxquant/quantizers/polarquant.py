"""Quantizer of recursive polar angles of a rotated vector.

Source: PolarQuant (arXiv 2502.02617).
"""

from typing import Any

import mlx.core as mx

from veloxquant.codebooks.base import CodebookFactory
from veloxquant.codebooks.strategies import MAX_BITS
from veloxquant.core.abstractions import ArtifactStore, Quantizer
from veloxquant.core.constants import DEFAULT_JL_DIM, DEFAULT_POLAR_LEVELS, DEFAULT_SEED
from veloxquant.core.context import EncodedVector, TransformResult
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.core.registry import QuantizerRegistry
from veloxquant.quantizers.rows import check_dim, narrow, norms, part, query, rows
from veloxquant.quantizers.turboquant_mse import seeded_rotation
from veloxquant.transforms import RecursivePolarTransform

FIRST_LEVEL_BITS = 2
"""Bits that the first level has more than the others: its range is four times as wide."""


@QuantizerRegistry.register("polar")
class PolarQuantizer(Quantizer):
    """`b` bits an angle, two more on the first level, and one radius for 2^n_levels coordinates."""

    def __init__(
        self,
        d: int,
        b: int = 2,
        m: int = DEFAULT_JL_DIM,
        seed: int = DEFAULT_SEED,
        n_levels: int = DEFAULT_POLAR_LEVELS,
        store: ArtifactStore | None = None,
        use_hadamard: bool = False,
        **kwargs: Any,
    ) -> None:
        del m, kwargs  # one signature for all quantizers
        check_dim(d)
        if not 1 <= b <= MAX_BITS - FIRST_LEVEL_BITS:
            raise QuantizerConfigError(
                f"b={b!r}; angles have 1 to {MAX_BITS - FIRST_LEVEL_BITS} bits, since the first "
                f"level takes {FIRST_LEVEL_BITS} more"
            )
        self.transform = RecursivePolarTransform(n_levels)
        if d % (1 << n_levels):
            raise QuantizerConfigError(
                f"d={d!r} is no multiple of 2^n_levels = {1 << n_levels}; use fewer levels"
            )
        self.d, self.b, self.seed = d, b, seed
        self.rotation = seeded_rotation(d, seed, store, use_hadamard=use_hadamard)
        self.codebooks = [
            CodebookFactory.create(
                "polar_level", b + FIRST_LEVEL_BITS if level == 1 else b, d, level
            )
            for level in range(1, n_levels + 1)
        ]

    def encode(self, x: Any) -> EncodedVector:
        """Angle codes (batch, d / 2^level) uint8 of each level and radii of vectors (batch, d)."""
        x, dtype = rows(x, self.d)
        polar = self.transform.forward(self.rotation.apply(x))
        angles = [
            book.quantize(angle) for book, angle in zip(self.codebooks, polar.angles, strict=True)
        ]
        radius = narrow(polar.final_radius, dtype)
        return EncodedVector("polar", x.shape[0], self.d, angles=angles, final_radius=radius)

    def _rotated(self, ev: EncodedVector) -> mx.array:
        codes = part(ev, "angles")
        angles = [book.dequantize(a) for book, a in zip(self.codebooks, codes, strict=True)]
        radius = norms(ev, "final_radius")
        return self.transform.inverse(TransformResult(angles, radius, len(angles)))

    def decode(self, ev: EncodedVector) -> mx.array:
        """Vectors (batch, d) in the type they came in; their norms are those that were stored."""
        out = self.rotation.apply_inverse(self._rotated(ev))
        return out.astype(part(ev, "final_radius").dtype)

    def estimate_inner_product(self, q: Any, ev: EncodedVector) -> mx.array:
        """Inner products (batch,) with the decoded vectors, computed in the rotated basis."""
        q, dtype = query(q, self.d)
        return (self._rotated(ev) @ self.rotation.apply(q)).astype(dtype)
