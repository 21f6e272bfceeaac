"""Codes of position-free keys, read by tables of products: the index that a2ats looks tokens up in.

A key is coded in the space where plain distance is the expected error of its scores: `k L` with
`L Lᵀ` the second moment of queries; a query becomes `q L⁻ᵀ`, and products stay what they were.
Source: A2ATS (arXiv 2502.12665), section on query-aware vector quantization.
"""

import mlx.core as mx
import numpy as np

from veloxquant.kernels import dispatch
from veloxquant.kernels.native import VECTOR, NativeRun, decode, seen
from veloxquant.math.kmeans import Nearest, kmeans
from veloxquant.quantizers.base import Packed, Shared, TokenAxis
from veloxquant.quantizers.bit_stream import pack_codes, unpack_codes
from veloxquant.quantizers.specs.vector import RetrievalSpec
from veloxquant.quantizers.vq import VectorTable

FIT_ROUNDS = 5
FIT_SEED = 1234
_TILE = 1024
_FIT_ROWS = 16
"""Pieces an entry that a codebook is fitted to; more cost time and gain little."""


class QueryWeighted:
    """The map of keys and queries for second moments (D, D) or (H, D, D)."""

    def __init__(self, moment: mx.array) -> None:
        h = np.asarray(seen(moment.astype(mx.float32)), dtype=np.float64)
        lower = np.linalg.cholesky(h)
        self.lower = mx.array(lower.astype(np.float32))
        self.inverse = mx.array(np.linalg.inv(lower).swapaxes(-1, -2).astype(np.float32))

    def rotate(self, k: mx.array) -> mx.array:
        """Keys (B, H, n, D) as they are coded."""
        return k @ self.lower

    def rotate_query(self, q: mx.array) -> mx.array:
        """Queries (B, H, M, D) whose products with coded keys are those with the keys."""
        return q @ self.inverse.astype(q.dtype)

    def unrotate(self, k: mx.array) -> mx.array:
        """Coded keys as keys."""
        return k @ self.inverse.swapaxes(-1, -2).astype(k.dtype)

    def __deepcopy__(self, memo: object) -> "QueryWeighted":
        """Constants are shared by copies."""
        return self


class RetrievalCodec(Shared):
    """`w` (B, H, T, words) uint32; fitted codes also `book` (B, H, 1, K, sub) bf16, one a head.

    `table` replaces the fitted codebook, `basis` the plain geometry.
    """

    def __init__(
        self,
        dim: int,
        spec: RetrievalSpec,
        table: VectorTable | None = None,
        basis: QueryWeighted | None = None,
    ) -> None:
        self.dim, self.spec = dim, spec
        self.n_sub = dim // spec.sub
        self.table, self.basis = table, basis
        self.axes = {"w": TokenAxis(2)}
        if table is not None:
            self.foreign += (table.centroids,)
        if basis is not None:
            self.foreign += (basis.lower,)

    def _coded(self, x: mx.array) -> mx.array:
        x = x.astype(mx.float32)
        return x if self.basis is None else self.basis.rotate(x)

    def encode(self, x: mx.array) -> Packed:
        """Pack position-free keys (B, H, n, D) with the given table."""
        assert self.table is not None
        return {"w": pack_codes(self.table.nearest(self._coded(x)), self.spec.bits)}

    def fit(self, x: mx.array) -> Packed:
        """One codebook a head and sequence, shared by all pieces of its keys."""
        batch, heads = x.shape[:2]
        size, sub = 1 << self.spec.bits, self.spec.sub
        rows = np.asarray(seen(mx.contiguous(self._coded(x)))).reshape(batch * heads, -1, sub)
        step = max(1, rows.shape[1] // max(1, _FIT_ROWS * size))
        books = [kmeans(r[::step], size, FIT_ROUNDS, FIT_SEED)[0] for r in rows]
        book = mx.array(np.stack(books)).reshape(batch, heads, 1, size, sub)
        return {"book": book.astype(mx.bfloat16)}

    def encode_fitted(self, x: mx.array, fitted: Packed) -> Packed:
        """Pack position-free keys with the fitted codebooks."""
        batch, heads, n, _ = x.shape
        book = np.asarray(seen(fitted["book"].astype(mx.float32)))
        rows = np.asarray(seen(mx.contiguous(self._coded(x))))
        codes = Nearest(book.reshape(batch * heads, *book.shape[3:]))(
            rows.reshape(batch * heads, n * self.n_sub, self.spec.sub)
        )
        codes = codes.reshape(batch, heads, n, self.n_sub).astype(np.uint32)
        return {"w": pack_codes(mx.array(codes), self.spec.bits)}

    def _book(self, packed: Packed) -> mx.array:
        """(B or 1, H or 1, n_sub or 1, K, sub) fp32."""
        return self.table.centroids if self.table else packed["book"].astype(mx.float32)

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Products by table: one row of K products for each query and piece, then T look-ups.

        Where the compiled kernel unpacks rows, a product with the rows is faster.
        """
        if self.basis is not None:
            q = self.basis.rotate_query(q)
        if q.dtype == mx.float32 and dispatch.decodes_natively(packed["w"].shape[2]):
            return self._scores_of_rows(q, packed)
        batch, heads, m, _ = q.shape
        codes = unpack_codes(packed["w"], self.spec.bits, self.n_sub)
        pieces = q.reshape(batch, heads, m, self.n_sub, self.spec.sub).swapaxes(2, 3)
        products = pieces @ self._book(packed).astype(q.dtype).swapaxes(-1, -2)
        out = mx.zeros((), dtype=q.dtype)
        for s in range(self.n_sub):
            index = mx.broadcast_to(codes[:, :, None, :, s], (batch, heads, m, codes.shape[2]))
            out = out + mx.take_along_axis(products[:, :, s], index, axis=-1)
        return out

    def _scores_of_rows(self, q: mx.array, packed: Packed) -> mx.array:
        """Products of coded queries with tiles of rows that the compiled kernel unpacks."""
        w, book, parts = packed["w"], self._book(packed), []
        mx.eval(w, book)
        batch, heads, n, _ = w.shape
        for start in range(0, n, _TILE):
            stop = min(start + _TILE, n)
            run = NativeRun(
                VECTOR, w, start, stop, self.dim, self.spec.bits, self.spec.sub, book=book
            )
            work = dispatch.threads(batch * heads * (stop - start) * self.dim)
            rows = decode(run, self.dim, work)
            assert rows is not None
            parts.append(q @ mx.array(rows).swapaxes(-1, -2))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Position-free keys (B, H, T, D)."""
        codes = unpack_codes(packed["w"], self.spec.bits, self.n_sub)
        batch, heads = codes.shape[:2]
        book = self._book(packed)
        wide = mx.broadcast_to(book, (batch, heads, self.n_sub, *book.shape[3:]))
        index = codes.swapaxes(2, 3)[..., None]
        rows = mx.take_along_axis(wide, index, axis=3).swapaxes(2, 3).flatten(-2)
        return (rows if self.basis is None else self.basis.unrotate(rows)).astype(dtype)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Weighted sums of position-free keys."""
        return w @ self.decode(packed, w.dtype)

    def native(self, packed: Packed, start: int, stop: int) -> None:
        """The compiled kernel has no such form."""
