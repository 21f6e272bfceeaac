"""Quantizer of one bit a coordinate with a corrected estimate, and a search over lists of keys.

Keys are centred, normalised and rotated; the signs are kept, and the product of the sign vector
with the true direction, which makes the estimate unbiased over rotations with a bounded error.
Source: RaBitQ (arXiv 2405.12497). Differs: lists come from k-means of all keys given to `fit`, and
the search ranks by inner product, which is what attention asks for.
"""

import math
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.artifacts import rotation_matrix
from veloxquant.core.abstractions import ArtifactStore, Quantizer
from veloxquant.core.constants import DEFAULT_SEED
from veloxquant.core.context import EncodedVector
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.core.registry import QuantizerRegistry
from veloxquant.math.kmeans import Nearest, kmeans
from veloxquant.preconditioners import RotationPreconditioner
from veloxquant.quantizers.rows import check_dim, narrow, norms, part, query, rows, unit

_BYTE = 8
_LIMIT = 0.7978845608028654
"""What the product of signs and direction tends to, sqrt(2/π)."""


@QuantizerRegistry.register("rabitq")
class RaBitQQuantizer(Quantizer):
    """Packed signs, a norm, the correction and the list of each key.

    Without `fit` there is one list, centred at zero. `nlist` lists are made by `fit`; a search
    looks into the best `nprobe` of them, ranks what it finds by the signs of the query alone, and
    scores the best `rerank` (at least as many as asked for) with the exact query.
    """

    def __init__(
        self,
        d: int,
        nlist: int = 64,
        nprobe: int = 8,
        rerank: int = 32,
        seed: int = DEFAULT_SEED,
        store: ArtifactStore | None = None,
        **kwargs: Any,
    ) -> None:
        del kwargs  # one signature for all quantizers
        check_dim(d)
        if not 1 <= nlist <= 1 << 16 or min(nprobe, rerank) < 1:
            raise QuantizerConfigError(
                f"nlist={nlist!r} must be 1 to 65536, nprobe={nprobe!r} and rerank={rerank!r} at "
                f"least 1"
            )
        self.d, self.nlist, self.nprobe, self.rerank, self.seed = d, nlist, nprobe, rerank, seed
        self.rotation = RotationPreconditioner(rotation_matrix(d, seed, store))
        self._centroids: mx.array | None = None
        self._nearest: Nearest | None = None
        self._lanes = -(-d // _BYTE) * _BYTE

    @property
    def trained(self) -> bool:
        """Whether lists were made."""
        return self._centroids is not None

    @property
    def compression_ratio(self) -> float:
        """Bytes of an fp16 key over the bytes of an encoded one, everything stored counted."""
        listed = 0 if self._centroids is None else self._list_type().size
        return 2 * self.d / (self._lanes // _BYTE + 4 + listed)

    def _list_type(self) -> mx.Dtype:
        return mx.uint8 if self.nlist <= 256 else mx.uint16

    def fit(self, keys: mx.array, max_samples: int = 8192) -> "RaBitQQuantizer":
        """Make the lists by k-means; keys encoded before cannot be read afterwards.

        Args:
            keys: (n, d).
            max_samples: keys looked at, spread evenly.

        Raises:
            ValueError: when there are fewer keys than lists, or keys that are not finite.
        """
        x = np.array(rows(keys, self.d).x)
        if len(x) < self.nlist:
            raise ValueError(f"{len(x)} keys cannot make {self.nlist} lists; use a smaller nlist")
        if not np.isfinite(x).all():
            raise ValueError("keys to fit are not finite numbers")
        if len(x) > max(max_samples, self.nlist):
            x = x[np.linspace(0, len(x) - 1, max(max_samples, self.nlist)).astype(np.int64)]
        centroids, _ = kmeans(x, self.nlist, iters=20, seed=self.seed)
        self._centroids, self._nearest = mx.array(centroids), Nearest(centroids)
        return self

    def encode(self, x: mx.array, **kwargs: Any) -> EncodedVector:
        """Signs (batch, d/8) uint8, norms, corrections and lists of keys (batch, d)."""
        del kwargs
        x, dtype = rows(x, self.d)
        lists = None
        if self._centroids is not None and self._nearest is not None:
            lists = mx.array(self._nearest(np.array(x)).astype(np.uint32))
            x = x - mx.take(self._centroids, lists, axis=0)
            lists = lists.astype(self._list_type())
        direction, norm = unit(x)
        y = self.rotation.apply(direction)
        bits = y > 0
        # <signs / sqrt(d), y>, of the signs that are stored
        factor = mx.where(bits, y, -y).sum(axis=-1) / math.sqrt(self.d)
        factor = mx.where(norm > 0, factor, _LIMIT)
        return EncodedVector(
            "rabitq", x.shape[0], self.d, indices=lists, norm=narrow(norm, dtype),
            signs=self._pack(bits), residual_norm=factor.astype(mx.float16),
        )  # fmt: skip

    def _pack(self, bits: mx.array) -> mx.array:
        bits = mx.pad(bits.astype(mx.uint8), [(0, 0), (0, self._lanes - self.d)])
        lanes = bits.reshape(bits.shape[0], self._lanes // _BYTE, _BYTE)
        return (lanes << mx.arange(_BYTE, dtype=mx.uint8)).sum(axis=-1).astype(mx.uint8)

    def _signs(self, packed: mx.array) -> mx.array:
        """±1 (n, d) fp32."""
        bits = (packed[..., None] >> mx.arange(_BYTE, dtype=mx.uint8)) & 1
        flat = bits.reshape(packed.shape[0], self._lanes)[:, : self.d]
        return flat.astype(mx.float32) * 2 - 1

    def _centres(self, ev: EncodedVector) -> mx.array | None:
        if ev.indices is None:
            return None
        if self._centroids is None:
            raise ValueError("these keys were encoded with lists; this quantizer has none")
        return mx.take(self._centroids, ev.indices.astype(mx.uint32), axis=0)

    def decode(self, ev: EncodedVector) -> mx.array:
        """Keys (batch, d), scaled for least squared error."""
        scale = norms(ev) * norms(ev, "residual_norm") / math.sqrt(self.d)
        out = self.rotation.apply_inverse(self._signs(part(ev, "signs")) * scale[:, None])
        centres = self._centres(ev)
        out = out if centres is None else out + centres
        return out.astype(part(ev, "norm").dtype)

    def _scores(self, q: mx.array, ev: EncodedVector, chosen: mx.array | None = None) -> mx.array:
        """Inner products of the query with all keys or the chosen ones, fp32."""
        signs, norm, factor = part(ev, "signs"), norms(ev), norms(ev, "residual_norm")
        lists = ev.indices
        if chosen is not None:
            signs, norm, factor = signs[chosen], norm[chosen], factor[chosen]
            lists = None if lists is None else lists[chosen]
        raw = self._signs(signs) @ self.rotation.apply(q)
        out = raw * norm / (factor * math.sqrt(self.d))
        if lists is not None and self._centroids is not None:
            out = out + mx.take(self._centroids @ q, lists.astype(mx.uint32))
        return out

    def estimate_inner_product(self, q: mx.array, ev: EncodedVector) -> mx.array:
        """Inner products (batch,), unbiased over rotations."""
        self._centres(ev)
        q, dtype = query(q, self.d)
        return self._scores(q, ev).astype(dtype)

    def error_bound(self, q: mx.array, ev: EncodedVector, eps: float = 1.9) -> mx.array:
        """Bound (batch,) on the error of the estimates; it fails with odds 2·exp(-c·eps²)."""
        q, _ = query(q, self.d)
        factor = mx.clip(norms(ev, "residual_norm"), 1e-3, 1.0)
        spread = mx.sqrt((1 - mx.square(factor)) / (mx.square(factor) * max(self.d - 1, 1)))
        return eps * mx.linalg.norm(q) * norms(ev) * spread

    def search(self, q: mx.array, ev: EncodedVector, top_k: int = 10) -> mx.array:
        """Indices (min(top_k, batch),) of the keys with the largest estimates, best first.

        Only keys in the best lists are looked at, more lists where those hold fewer than `top_k`.
        """
        if top_k < 1:
            raise ValueError(f"top_k={top_k!r}; ask for at least one key")
        self._centres(ev)
        q, _ = query(q, self.d)
        wanted = min(top_k, ev.batch_size)
        near = self._probe(q, ev, wanted)
        keep = max(self.rerank, wanted)
        if near.shape[0] > keep:
            order = mx.argsort(-self._hamming(q, ev, near))[:keep]
            near = mx.sort(near[order])
        scores = self._scores(q, ev, near)
        return near[mx.argsort(-scores)[:wanted]].astype(mx.int32)

    def _probe(self, q: mx.array, ev: EncodedVector, wanted: int) -> mx.array:
        """Keys of the best lists, ascending."""
        if ev.indices is None or self._centroids is None:
            return mx.arange(ev.batch_size)
        lists = np.array(ev.indices).astype(np.int64)
        ranking = np.argsort(-np.array(self._centroids @ q), kind="stable")
        reach = np.cumsum(np.bincount(lists, minlength=self.nlist)[ranking])
        enough = int(np.searchsorted(reach, wanted)) + 1
        chosen = np.zeros(self.nlist, dtype=bool)
        chosen[ranking[: max(self.nprobe, enough)]] = True
        return mx.array(np.flatnonzero(chosen[lists]))

    def _hamming(self, q: mx.array, ev: EncodedVector, near: mx.array) -> mx.array:
        """Rough inner products from the signs of the query: popcounts and the centres."""
        rotated = self.rotation.apply(q)
        signs = self._pack((rotated > 0)[None])
        apart = _POPCOUNT[(part(ev, "signs")[near] ^ signs).astype(mx.uint32)].sum(axis=-1)
        cosine = mx.sin((1 - 2 * apart.astype(mx.float32) / self.d) * (math.pi / 2))
        out = cosine * norms(ev)[near] * mx.linalg.norm(q)
        if ev.indices is not None and self._centroids is not None:
            lists = ev.indices[near].astype(mx.uint32)
            out = out + mx.take(self._centroids @ q, lists)
        return out


_POPCOUNT = mx.array([n.bit_count() for n in range(256)], dtype=mx.uint32)
