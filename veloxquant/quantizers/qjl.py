"""Quantizer of sign sketches: one bit for each of m projections, unbiased inner products.

Source: QJL (arXiv 2406.03482).
"""

from typing import Any

import mlx.core as mx

from veloxquant.artifacts import jl_matrix
from veloxquant.core.abstractions import ArtifactStore, Quantizer
from veloxquant.core.constants import DEFAULT_JL_DIM, DEFAULT_SEED
from veloxquant.core.context import EncodedVector
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.core.registry import QuantizerRegistry
from veloxquant.preconditioners import QJLEncoder
from veloxquant.quantizers.rows import check_dim, narrow, norms, part, query, rows


@QuantizerRegistry.register("qjl")
class QJLQuantizer(Quantizer):
    """Signs of a Gaussian sketch and the norm; more rows than d are worth their bits."""

    def __init__(
        self,
        d: int,
        m: int = DEFAULT_JL_DIM,
        seed: int = DEFAULT_SEED,
        b: int = 1,
        store: ArtifactStore | None = None,
        **kwargs: Any,
    ) -> None:
        del b, kwargs  # one signature for all quantizers: a sign has one bit
        check_dim(d)
        if m < 1:
            raise QuantizerConfigError(f"m={m!r}; a sketch has at least one row")
        self.d, self.m, self.seed = d, m, seed
        self._encoder = QJLEncoder(jl_matrix(d, m, seed, store))

    def encode(self, x: Any) -> EncodedVector:
        """Signs (batch, m) int8 and norms of vectors (batch, d)."""
        x, dtype = rows(x, self.d)
        signs, norm = self._encoder.encode_key(x)
        return EncodedVector("qjl", x.shape[0], self.d, norm=narrow(norm, dtype), signs=signs)

    def decode(self, ev: EncodedVector) -> mx.array:
        """Vectors whose average over seeds is the encoded one; each alone is far from it."""
        out = self._encoder.decode_key(part(ev, "signs"), norms(ev))
        return out.astype(part(ev, "norm").dtype)

    def estimate_inner_product(self, q: Any, ev: EncodedVector) -> mx.array:
        """Unbiased inner products (batch,)."""
        q, dtype = query(q, self.d)
        return self._encoder.estimate_ip(q, part(ev, "signs"), norms(ev)).astype(dtype)
