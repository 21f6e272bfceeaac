"""Product codes: tables of short vectors, and the codec that stores rows as indices into one.

Source: VecInfer (arXiv 2510.06175). Products read tiles of rows put together from the table: a
table of products for each query would cost more than it saves below thousands of tokens.
"""

from functools import lru_cache

import mlx.core as mx
import numpy as np

from veloxquant.core.exceptions import CodebookDimensionMismatch
from veloxquant.kernels.native import VECTOR, NativeRun, seen
from veloxquant.math.kmeans import Nearest
from veloxquant.quantizers import gaussian
from veloxquant.quantizers.base import Packed, Shared, TokenAxis
from veloxquant.quantizers.bit_stream import pack_codes, unpack_codes
from veloxquant.quantizers.hadamard import SmoothHadamard, hadamard
from veloxquant.quantizers.specs.vector import VectorSpec

TILE = 1024
_TINY = 1e-30
_SCORE_ELEMENTS = 1 << 24


class VectorTable(Shared):
    """Centroids for every code, (1, H or 1, n_sub or 1, K, sub) fp32, and the nearest of them.

    `n_signs` of a code's high bits are signs of its coordinates: 0, or `sub` for a table that is
    closed under changes of sign, of which the search then needs the magnitudes only.
    """

    def __init__(self, centroids: np.ndarray, n_signs: int = 0) -> None:
        c = np.ascontiguousarray(centroids, dtype=np.float32)
        self.size, self.sub = c.shape[-2:]
        lead = (1,) * (4 - c.ndim) + c.shape[:-2]
        self.lead: tuple[int, int] = (lead[0], lead[1])
        self.centroids = mx.array(c.reshape(1, *lead, self.size, self.sub))
        self.n_signs = n_signs
        searched = np.abs(c[: self.size >> n_signs]) if n_signs else c
        groups = lead[0] * lead[1]
        wide = groups > 1
        self._searched = searched.reshape(groups, -1, self.sub) if wide else searched
        self._nearest = Nearest(self._searched if wide else searched.reshape(-1, self.sub))
        self._flat = self.centroids.reshape(-1, self.sub)
        first = mx.arange(groups, dtype=mx.uint32).reshape(1, lead[0], 1, lead[1])
        self._first = first * self.size if wide else None
        mx.eval(self.centroids, self._flat, first)

    def nearest(self, x: mx.array) -> mx.array:
        """Codes (B, H, n, n_sub) uint32 of rows (B, H, n, n_sub·sub)."""
        batch, heads, n, dim = x.shape
        x = x.astype(mx.float32).reshape(batch, heads, n, dim // self.sub, self.sub)
        searched = mx.abs(x) if self.n_signs else x
        if mx.default_device() == mx.cpu:
            codes = self._search(np.asarray(searched))
        else:
            codes = self.nearest_on_device(searched)
        if self.n_signs:
            weight = mx.arange(self.sub, dtype=mx.uint32)
            signs = ((x >= 0).astype(mx.uint32) << weight).sum(axis=-1).astype(mx.uint32)
            codes = codes | (signs * (self.size >> self.n_signs))
        return codes

    def _search(self, x: np.ndarray) -> mx.array:
        """Magnitude or whole codes of (B, H, n, n_sub, sub), on the CPU."""
        batch, heads, n, n_sub, sub = x.shape
        h, s = self.lead
        if h * s == 1:
            codes = self._nearest(x.reshape(-1, sub)).reshape(x.shape[:-1])
            return mx.array(codes.astype(np.uint32))
        # Vectors by the table they belong to: (h, s) groups, the rest in one row.
        split = x.reshape(batch, h, heads // h, n, s, n_sub // s, sub)
        order = (1, 4, 0, 2, 3, 5)
        codes = self._nearest(split.transpose(*order, 6).reshape(h * s, -1, sub))
        codes = codes.reshape([split.shape[i] for i in order]).transpose(np.argsort(order))
        return mx.array(np.ascontiguousarray(codes).reshape(x.shape[:-1]).astype(np.uint32))

    def nearest_on_device(self, x: mx.array) -> mx.array:
        """As `nearest` for (B, H, n, n_sub, sub), with array operations only."""
        table = mx.array(self._searched).reshape(1, *self.lead, -1, self.sub)
        half = mx.square(table).sum(axis=-1) / 2
        step = max(1, _SCORE_ELEMENTS // max(1, x.size // max(1, x.shape[2]) * table.shape[-2]))
        parts = []
        for i in range(0, x.shape[2], step):
            rows = x[:, :, i : i + step].swapaxes(2, 3)
            score = rows @ table.swapaxes(-1, -2) - half[..., None, :]
            parts.append(score.argmax(axis=-1).swapaxes(2, 3))
        codes = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        return codes.astype(mx.uint32)

    def rows(self, codes: mx.array) -> mx.array:
        """Codes (B, H, n, n_sub) as rows (B, H, n, n_sub·sub) fp32."""
        if self._first is not None:
            codes = codes + self._first
        return mx.take(self._flat, codes, axis=0).flatten(-2)


@lru_cache(maxsize=32)
def gaussian_table(sub: int, bits: int) -> VectorTable:
    """The table of unit Gaussian vectors for codes of `bits` bits over `sub` channels."""
    n_signs = gaussian.sign_bits(sub, bits)
    size = 1 << (bits - n_signs)
    kind: gaussian.Kind = "magnitude" if n_signs else "signed"
    centroids = gaussian.centroids(size, sub, kind)
    return VectorTable(gaussian.with_signs(centroids) if n_signs else centroids, n_signs)


def given_table(
    codebook: object, field: str, *, sub: int, bits: int, heads: int, dim: int, layer: int = 0
) -> VectorTable:
    """The table of a codebook from a configuration or a calibration.

    Args:
        codebook: (2^bits, sub), (n_sub, 2^bits, sub), (H, n_sub, 2^bits, sub), or the last with an
            axis of layers in front; H and n_sub may be 1.
        field: its name, for the error.
        sub: channels a code.
        bits: bits a code.
        heads: KV heads of the layer.
        dim: channels of a row.
        layer: index into the axis of layers.

    Raises:
        CodebookDimensionMismatch: when the shape is another one, or a value is not finite.
    """
    a = seen(codebook.astype(mx.float32)) if isinstance(codebook, mx.array) else codebook
    a = np.asarray(a)
    given = a.shape
    if a.ndim == 5 and layer < len(a):
        a = a[layer]
    n_sub = dim // sub
    fits = 2 <= a.ndim <= 4 and a.shape[-2:] == (1 << bits, sub)
    lead = (1,) * (4 - a.ndim) + a.shape[:-2]
    if not fits or lead[0] not in (1, heads) or lead[1] not in (1, n_sub):
        raise CodebookDimensionMismatch(
            f"{field} of shape {given} does not fit; give (2^bits, sub) = ({1 << bits}, {sub}), "
            f"or that with ({n_sub},) or ({heads}, {n_sub}) in front, "
            f"or change the options that say bits and channels of a code"
        )
    a = a.astype(np.float32)
    if not np.isfinite(a).all():
        raise CodebookDimensionMismatch(f"{field} holds values that are not finite")
    return VectorTable(a)


class VectorCodec(Shared):
    """`w` (B, H, T, words) uint32; with `spec.scaled` also `s` (B, H, T, 1), the RMS of a token.

    Scales are bf16, or fp32 for fp32 rows. `table` replaces the Gaussian one, `basis` the plain
    rotation.
    """

    def __init__(
        self,
        dim: int,
        spec: VectorSpec,
        table: VectorTable | None = None,
        basis: SmoothHadamard | None = None,
    ) -> None:
        self.dim, self.spec = dim, spec
        self.n_sub = dim // spec.sub
        self.table = table or gaussian_table(spec.sub, spec.bits)
        self.basis = basis or (hadamard(dim) if spec.basis == "hadamard" else None)
        self.axes = {name: TokenAxis(2) for name in (("w", "s") if spec.scaled else ("w",))}
        if table is not None:
            self.foreign += (table.centroids,)
        if basis is not None and basis.smooth is not None:
            self.foreign += (basis.smooth,)

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) for any n; every token alone."""
        y = x.astype(mx.float32)
        if self.basis is not None:
            y = self.basis.rotate(y)
        if not self.spec.scaled:
            return {"w": pack_codes(self.table.nearest(y), self.spec.bits)}
        # Two steps, so that squares of large coordinates stay finite.
        peak = mx.maximum(mx.abs(y).max(axis=-1, keepdims=True), _TINY)
        rms = peak * mx.sqrt(mx.square(y / peak).mean(axis=-1, keepdims=True))
        narrow = mx.float32 if x.dtype == mx.float32 else mx.bfloat16
        scale = mx.where(peak > _TINY, rms, 0.0).astype(narrow)
        y = y / mx.maximum(scale.astype(mx.float32), _TINY)
        return {"w": pack_codes(self.table.nearest(y), self.spec.bits), "s": scale}

    def coded(self, packed: Packed) -> mx.array:
        """Rows as stored, scales included, (B, H, T, D) fp32."""
        rows = self.table.rows(unpack_codes(packed["w"], self.spec.bits, self.n_sub))
        return rows * packed["s"].astype(mx.float32) if self.spec.scaled else rows

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        rows = self.coded(packed)
        return (rows if self.basis is None else self.basis.unrotate(rows)).astype(dtype)

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Products of queries in the table's basis with tiles of rows."""
        if self.basis is not None:
            q = self.basis.rotate_query(q)
        parts = [
            q @ self.coded(tile).astype(q.dtype).swapaxes(-1, -2) for tile in tiles(packed, self)
        ]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Sum in the table's basis, rotated back once."""
        out, start = mx.zeros((), dtype=w.dtype), 0
        for tile in tiles(packed, self):
            n = tile["w"].shape[2]
            out = out + w[..., start : start + n] @ self.coded(tile).astype(w.dtype)
            start += n
        return out if self.basis is None else self.basis.unrotate(out)

    def native(self, packed: Packed, start: int, stop: int) -> NativeRun:
        """How the compiled kernel reads these rows: queries and sums are in the table's basis."""
        return NativeRun(
            VECTOR, packed["w"], start, stop, self.dim, self.spec.bits, self.spec.sub,
            scale=packed.get("s"), book=self.table.centroids, basis=self.basis,
        )  # fmt: skip


def tiles(packed: Packed, codec: VectorCodec) -> list[Packed]:
    """Token ranges small enough that their decoded rows stay in cache."""
    n = packed["w"].shape[2]
    return [
        {name: packed[name][:, :, i : i + TILE] for name in codec.axes} for i in range(0, n, TILE)
    ]
