"""Quantizer of keys without position by codebooks that commute with rotary position encoding.

A pair of channels is one complex number, and the encoding multiplies it by a phase; entries of
complex numbers therefore turn as the key does. A key is coded once, whatever its position, and the
phase is put on when it is read, or on the table of products with a query. Codebooks cover an equal
share of the pairs each; further stages code what the stages before left over.
Source: CommVQ (arXiv 2506.18879). Differs: k-means instead of expectation maximisation over
structured matrices, one share of the pairs a codebook, no learned encoder of values.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.core.abstractions import Quantizer
from veloxquant.core.constants import DEFAULT_SEED
from veloxquant.core.context import EncodedVector
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.core.registry import QuantizerRegistry
from veloxquant.math.kmeans import Nearest, kmeans
from veloxquant.quantizers.a2ats_rope import plain_freqs
from veloxquant.quantizers.rows import check_dim, narrow, norms, part, query, rows, unit

_BYTE = 8


@QuantizerRegistry.register("comm_vq")
class CommVQQuantizer(Quantizer):
    """Codes, norms and positions of keys; `fit` comes first.

    Args:
        d: channels of a key, even; pairs are (i, i + d/2).
        b: bits of a code, 1 to 8.
        n_codebooks: codebooks a stage; each covers d / n_codebooks channels, an even number.
        m: channels of a codebook, instead of `n_codebooks`.
        seed: of k-means.
        store: unused; codebooks belong to the data.
        rope_base: base of the position encoding.
        n_em_iters: rounds of k-means at most.
        n_stages: codes a codebook, each for what the ones before left over.
        freqs: wavelength of each pair, for scaled encodings.
    """

    def __init__(
        self,
        d: int,
        b: int = 8,
        n_codebooks: int = 4,
        m: int | None = None,
        seed: int = DEFAULT_SEED,
        store: Any = None,
        rope_base: float = 10000.0,
        n_em_iters: int = 50,
        n_stages: int = 1,
        freqs: mx.array | None = None,
        **kwargs: Any,
    ) -> None:
        del store, kwargs  # one signature for all quantizers
        check_dim(d)
        if m is not None and m != d:  # the factory passes d where nothing was asked for
            n_codebooks = d // m if m > 0 and d % m == 0 else 0
        fits = n_codebooks > 0 and d % n_codebooks == 0 and d // n_codebooks % 2 == 0
        if not fits or not 1 <= b <= _BYTE or n_stages < 1 or n_em_iters < 1:
            raise QuantizerConfigError(
                f"d={d}, b={b}, n_codebooks={n_codebooks}, n_stages={n_stages}, n_em_iters="
                f"{n_em_iters}: codebooks must cover an even number of channels each, b must be 1 "
                f"to 8, stages and rounds at least 1"
            )
        self.d, self.b, self.seed, self.n_em_iters = d, b, seed, n_em_iters
        self.n_codebooks, self.n_stages, self.sub_dim = n_codebooks, n_stages, d // n_codebooks
        self.freqs = plain_freqs(d, rope_base) if freqs is None else freqs
        self.errors: list[float] = []
        """Mean squared error a coordinate of unit variance after each stage of the last `fit`."""
        self._books: np.ndarray | None = None
        self._tables: mx.array | None = None

    @property
    def trained(self) -> bool:
        """Whether `fit` was called."""
        return self._books is not None

    @property
    def compression_ratio(self) -> float:
        """Bits of an fp16 key over those of its codes and norm."""
        return 16 * self.d / (self.n_stages * self.n_codebooks * self.b + 16)

    @property
    def stored_compression_ratio(self) -> float:
        """Bytes of an fp16 key over the bytes stored: a byte a code, norm and position."""
        return 2 * self.d / (self.n_stages * self.n_codebooks + 2 + 4)

    def fit(self, keys_pre_rope: Any, max_samples: int = 8192) -> "CommVQQuantizer":
        """Train the codebooks on keys (n, d) without position.

        Args:
            keys_pre_rope: keys.
            max_samples: keys looked at, spread evenly.

        Raises:
            ValueError: without keys, or for keys that are not finite.
        """
        direction, norm = unit(rows(keys_pre_rope, self.d).x)
        x = np.array(self._paired(direction) * self.d**0.5)[np.array(norm) > 0]
        if not len(x) or not np.isfinite(x).all():
            raise ValueError("keys to fit must be finite, and at least one of them not zero")
        if len(x) > max_samples:
            x = x[np.linspace(0, len(x) - 1, max_samples).astype(np.int64)]
        left = x.reshape(len(x), self.n_codebooks, self.sub_dim)
        shape = (self.n_stages, self.n_codebooks, 1 << self.b, self.sub_dim)
        books = np.empty(shape, dtype=np.float32)
        self.errors = []
        for r in range(self.n_stages):
            for s in range(self.n_codebooks):
                at = self.seed + r * self.n_codebooks + s
                books[r, s] = kmeans(left[:, s], 1 << self.b, self.n_em_iters, at)[0]
            codes = Nearest(books[r])(left.swapaxes(0, 1))
            left = left - _picked(books[r], codes)
            self.errors.append(float(np.square(left).mean()))
        self._books, self._tables = books, mx.array(books)
        return self

    def _paired(self, x: mx.array) -> mx.array:
        """Channels in the order of pairs: both parts of a complex number are neighbours."""
        return x.reshape(-1, 2, self.d // 2).swapaxes(1, 2).reshape(-1, self.d)

    def encode(self, x: Any, positions: Any | None = None) -> EncodedVector:
        """Codes (batch, stages·codebooks) uint8, norms, and positions in `angles[0]`.

        Args:
            x: keys (batch, d) without position.
            positions: (batch,) whole numbers; 0, 1, 2, … by default.

        Raises:
            ValueError: before `fit`, or for positions of another shape.
        """
        books, _ = self._trained()
        x, dtype = rows(x, self.d)
        at = mx.arange(x.shape[0]) if positions is None else mx.array(positions)
        if at.shape != (x.shape[0],):
            raise ValueError(f"positions of shape {at.shape}; give one a key, ({x.shape[0]},)")
        direction, norm = unit(x)
        left = np.array(self._paired(direction) * self.d**0.5)
        left = left.reshape(len(left), self.n_codebooks, self.sub_dim)
        codes = []
        for book in books:
            index = Nearest(book)(left.swapaxes(0, 1))
            left = left - _picked(book, index)
            codes.append(index.T)
        return EncodedVector(
            "comm_vq", x.shape[0], self.d,
            indices=mx.array(np.concatenate(codes, axis=1).astype(np.uint8)),
            norm=narrow(norm, dtype), angles=[at.astype(mx.int32)],
        )  # fmt: skip

    def _trained(self) -> tuple[np.ndarray, mx.array]:
        """Codebooks (stages, books, K, sub), twice."""
        if self._books is None or self._tables is None:
            raise ValueError("there are no codebooks yet; call fit with keys first")
        return self._books, self._tables

    def _phases(self, ev: EncodedVector) -> tuple[mx.array, mx.array]:
        """Cosine and sine of each key's angle at each pair, (batch, d/2) fp32."""
        if not ev.angles:
            raise ValueError("encoded vectors without positions; they are another quantizer's")
        angle = ev.angles[0].astype(mx.float32)[:, None] / self.freqs
        return mx.cos(angle), mx.sin(angle)

    def _codes(self, ev: EncodedVector) -> mx.array:
        shape = (ev.batch_size, self.n_stages, self.n_codebooks)
        return part(ev, "indices").astype(mx.uint32).reshape(shape)

    def decode_pre_rope(self, ev: EncodedVector) -> mx.array:
        """Keys (batch, d) without position, fp32."""
        _, tables = self._trained()
        codes, total = self._codes(ev), mx.zeros((ev.batch_size, self.d))
        for r in range(self.n_stages):
            total = total + _gathered(tables[r], codes[:, r])
        scale = norms(ev)[:, None] / self.d**0.5
        return total.reshape(-1, self.d // 2, 2).swapaxes(1, 2).reshape(-1, self.d) * scale

    def decode(self, ev: EncodedVector) -> mx.array:
        """Keys (batch, d) turned to their positions, in the type of their norms."""
        plain, (cos, sin) = self.decode_pre_rope(ev), self._phases(ev)
        a, b = plain[:, : self.d // 2], plain[:, self.d // 2 :]
        out = mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
        return out.astype(part(ev, "norm").dtype)

    def estimate_inner_product(self, q: Any, ev: EncodedVector) -> mx.array:
        """Inner products (batch,) of a turned query (d,) with the turned keys.

        By table: each entry's product with the query is a complex number for each pair; a token
        picks its own and turns them by its phases.
        """
        _, tables = self._trained()
        q, dtype = query(q, self.d)
        cos, sin = self._phases(ev)
        half = self.d // 2
        shape = (self.n_codebooks, 1, self.sub_dim // 2)
        qa, qb = q[:half].reshape(shape), q[half:].reshape(shape)
        codes, real, imaginary = self._codes(ev), mx.zeros(()), mx.zeros(())
        for r in range(self.n_stages):
            a, b = tables[r][..., ::2], tables[r][..., 1::2]
            real = real + _gathered(qa * a + qb * b, codes[:, r])
            imaginary = imaginary + _gathered(qa * b - qb * a, codes[:, r])
        out = (cos * real - sin * imaginary).sum(axis=-1) * norms(ev) / self.d**0.5
        return out.astype(dtype)


def _picked(book: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Entries (n, books, sub) at codes (books, n)."""
    return np.take_along_axis(book, codes[..., None], axis=1).swapaxes(0, 1)


def _gathered(table: mx.array, codes: mx.array) -> mx.array:
    """Entries of tables (books, K, s) at codes (n, books), side by side: (n, books·s)."""
    first = mx.arange(table.shape[0], dtype=mx.uint32) * table.shape[1]
    return mx.take(table.reshape(-1, table.shape[-1]), codes + first, axis=0).flatten(-2)
