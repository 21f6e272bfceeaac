"""Quantizer for inner products: b - 1 bits by table, one bit a sketch of what is left.

Source: TurboQuant (arXiv 2504.19874), algorithm 2, with QJL (arXiv 2406.03482).
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from veloxquant.artifacts import jl_matrix
from veloxquant.codebooks.adaptive_codebook import AdaptiveScalarCodebook
from veloxquant.codebooks.scalar_codebook import ScalarCodebook
from veloxquant.codebooks.strategies import check_bits
from veloxquant.core.abstractions import ArtifactStore, Quantizer
from veloxquant.core.constants import DEFAULT_SEED
from veloxquant.core.context import EncodedVector
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.core.registry import QuantizerRegistry
from veloxquant.preconditioners import QJLEncoder
from veloxquant.quantizers.rows import check_dim, narrow, norms, part, query, rows, unit
from veloxquant.quantizers.turboquant_mse import seeded_rotation, stored_codebook


@dataclass
class AdaptiveEncodedVector(EncodedVector):
    """Encoded with fitted levels if `fitted`, else with the ones that hold before the fit."""

    fitted: bool = False


@QuantizerRegistry.register("turboquant_prod")
class TurboQuantProd(Quantizer):
    """`b` bits a coordinate, the sign included, when m = d; inner products without bias.

    With `use_adaptive_codebook` the table is fitted to the first `n_calib` vectors; vectors that
    were encoded before keep the table they were encoded with.
    """

    def __init__(
        self,
        d: int,
        b: int = 3,
        m: int | None = None,
        seed: int = DEFAULT_SEED,
        store: ArtifactStore | None = None,
        use_hadamard: bool = False,
        use_adaptive_codebook: bool = False,
        n_calib: int = 64,
        **kwargs: Any,
    ) -> None:
        del kwargs  # one signature for all quantizers
        check_dim(d)
        check_bits(b)
        self.d, self.b, self.seed = d, b, seed
        self.m = self.m_default(d, b) if m is None else m
        if self.m < 1:
            raise QuantizerConfigError(f"m={m!r}; a sketch has at least one row")
        self.rotation = seeded_rotation(d, seed, store, use_hadamard=use_hadamard)
        self.codebook: ScalarCodebook | None = None
        self.adaptive: AdaptiveScalarCodebook | None = None
        if b > 1:
            self.codebook = stored_codebook("gaussian", b - 1, d, store)
            if use_adaptive_codebook:
                self.adaptive = AdaptiveScalarCodebook(b - 1, d, n_calib, self.codebook)
        # The sketch acts in the rotated basis; a seed of its own keeps it independent of the basis.
        self._encoder = QJLEncoder(jl_matrix(d, self.m, seed + 1, store))

    @staticmethod
    def m_default(d: int, b: int) -> int:
        """Rows of the sketch when none are asked for: one sign a coordinate, at any width."""
        del b
        return d

    def encode(self, x: Any) -> EncodedVector:
        """Indices (batch, d) uint8, signs (batch, m) int8 and two norms of vectors (batch, d)."""
        x, dtype = rows(x, self.d)
        direction, norm = unit(x)
        rotated = self.rotation.apply(direction)
        book = self.codebook
        fitted = self.adaptive is not None and self.adaptive.is_calibrated
        if self.adaptive is not None:
            book = self.adaptive.codebook
            self.adaptive.observe(rotated)
        indices = None if book is None else book.quantize(rotated)
        residual = rotated if book is None else rotated - book.dequantize(indices)
        signs, residual_norm = self._encoder.encode_key(residual)
        given: dict[str, Any] = {
            "indices": indices,
            "norm": narrow(norm, dtype),
            "signs": signs,
            "residual_norm": residual_norm.astype(dtype),
        }
        if self.adaptive is not None:
            name = "turboquant_prod_adaptive"
            return AdaptiveEncodedVector(name, x.shape[0], self.d, **given, fitted=fitted)
        return EncodedVector("turboquant_prod", x.shape[0], self.d, **given)

    def _coarse(self, ev: EncodedVector) -> mx.array | None:
        """The table's part of the unit vectors, in the rotated basis."""
        if self.codebook is None:
            return None
        is_fitted = isinstance(ev, AdaptiveEncodedVector) and ev.fitted
        book = self.adaptive if is_fitted and self.adaptive is not None else self.codebook
        return book.dequantize(part(ev, "indices"))

    def decode(self, ev: EncodedVector) -> mx.array:
        """Vectors (batch, d), unbiased but noisier than the table alone would give."""
        out = self._encoder.decode_key(part(ev, "signs"), norms(ev, "residual_norm"))
        coarse = self._coarse(ev)
        out = out if coarse is None else out + coarse
        whole = self.rotation.apply_inverse(out * norms(ev)[:, None])
        return whole.astype(part(ev, "norm").dtype)

    def estimate_inner_product(self, q: Any, ev: EncodedVector) -> mx.array:
        """Unbiased inner products (batch,)."""
        q, dtype = query(q, self.d)
        rotated = self.rotation.apply(q)
        out = self._encoder.estimate_ip(rotated, part(ev, "signs"), norms(ev, "residual_norm"))
        coarse = self._coarse(ev)
        out = out if coarse is None else out + coarse @ rotated
        return (out * norms(ev)).astype(dtype)


@QuantizerRegistry.register("turboquant_prod_adaptive")
class TurboQuantProdAdaptive(TurboQuantProd):
    """The same with a table that is fitted to the first vectors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["use_adaptive_codebook"] = True
        super().__init__(*args, **kwargs)
