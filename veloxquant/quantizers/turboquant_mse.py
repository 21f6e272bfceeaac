"""Quantizer of rotated coordinates by one scalar table, for least squared error.

Source: TurboQuant (arXiv 2504.19874), algorithm 1.
"""

from typing import Any, Literal

import mlx.core as mx

from veloxquant.artifacts import codebook, rotation_matrix
from veloxquant.codebooks.base import CodebookFactory
from veloxquant.codebooks.scalar_codebook import ScalarCodebook
from veloxquant.codebooks.strategies import check_bits
from veloxquant.core.abstractions import ArtifactStore, Preconditioner, Quantizer
from veloxquant.core.constants import DEFAULT_JL_DIM, DEFAULT_SEED
from veloxquant.core.context import EncodedVector
from veloxquant.core.registry import QuantizerRegistry
from veloxquant.math.rotation import make_hadamard_diagonal
from veloxquant.preconditioners import HadamardPreconditioner, RotationPreconditioner
from veloxquant.quantizers.rows import check_dim, narrow, norms, part, query, rows, unit


def seeded_rotation(
    d: int, seed: int, store: ArtifactStore | None, *, use_hadamard: bool
) -> Preconditioner:
    """The rotation of the quantizers: Haar, or Hadamard with random signs."""
    if use_hadamard:
        return HadamardPreconditioner(make_hadamard_diagonal(d, seed))
    return RotationPreconditioner(rotation_matrix(d, seed, store))


def stored_codebook(
    distribution: Literal["gaussian", "beta"], b: int, d: int, store: ArtifactStore | None
) -> ScalarCodebook:
    """A codebook of the factory, or the one of the same name in the store."""
    made = CodebookFactory.create(distribution, b, d)
    if store is None:
        return made
    return ScalarCodebook(codebook(distribution, b, d, store, made.centroids_numpy))


@QuantizerRegistry.register("turboquant_mse")
class TurboQuantMSE(Quantizer):
    """`b` bits a coordinate and a norm; inner products come out smaller by about the error.

    `use_beta` takes the table for coordinates on the sphere instead of the Gaussian one, which
    matters for small d only; `use_hadamard` rotates without a matrix.
    """

    def __init__(
        self,
        d: int,
        b: int = 2,
        seed: int = DEFAULT_SEED,
        m: int = DEFAULT_JL_DIM,
        store: ArtifactStore | None = None,
        use_beta: bool = False,
        use_hadamard: bool = False,
        **kwargs: Any,
    ) -> None:
        del m, kwargs  # one signature for all quantizers
        check_dim(d)
        check_bits(b)
        self.d, self.b, self.seed = d, b, seed
        self.rotation = seeded_rotation(d, seed, store, use_hadamard=use_hadamard)
        self.codebook = stored_codebook("beta" if use_beta else "gaussian", b, d, store)

    def encode(self, x: Any) -> EncodedVector:
        """Indices (batch, d) uint8 and norms of vectors (batch, d)."""
        x, dtype = rows(x, self.d)
        direction, norm = unit(x)
        indices = self.codebook.quantize(self.rotation.apply(direction))
        return EncodedVector(
            "turboquant_mse", x.shape[0], self.d, indices=indices, norm=narrow(norm, dtype)
        )

    def _rotated(self, ev: EncodedVector) -> mx.array:
        return self.codebook.dequantize(part(ev, "indices")) * norms(ev)[:, None]

    def decode(self, ev: EncodedVector) -> mx.array:
        """Vectors (batch, d) in the type they came in."""
        return self.rotation.apply_inverse(self._rotated(ev)).astype(part(ev, "norm").dtype)

    def estimate_inner_product(self, q: Any, ev: EncodedVector) -> mx.array:
        """Inner products (batch,) with the decoded vectors, computed in the rotated basis."""
        q, dtype = query(q, self.d)
        return (self._rotated(ev) @ self.rotation.apply(q)).astype(dtype)
