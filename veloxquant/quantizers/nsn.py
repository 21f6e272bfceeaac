"""Normalise, shift, normalise, rotate, code: what nsnquant stores of a chunk of tokens.

`x = s1 (s2 z + m)`: tokens are brought to RMS 1, the chunk's mean is taken off, and the rest is
brought to RMS 1 again. Rotated, it looks like independent normal numbers whatever the model, so one
codebook serves everything. Means are stored rotated, so that a token is `a·u + c·m` in one basis.
Source: NSNQuant (arXiv 2505.18231); the scale `a` carries the factor of least squared error.
"""

import mlx.core as mx

from veloxquant.kernels.native import VECTOR, NativeRun
from veloxquant.quantizers import gaussian
from veloxquant.quantizers.base import Packed, Shared, TokenAxis, saturated
from veloxquant.quantizers.bit_stream import pack_codes, unpack_codes
from veloxquant.quantizers.hadamard import hadamard
from veloxquant.quantizers.specs.vector import NSNSpec
from veloxquant.quantizers.vq import VectorTable

_FLOOR = 1e-6
_TINY = 1e-30
_TILE = 1024
_CHUNK_BITS = 16
"""Width of a chunk's number where the kernel takes means for the entries of a codebook."""


def root_mean_square(x: mx.array) -> mx.array:
    """RMS over the last axis, kept, in two steps so that large squares stay finite."""
    peak = mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), _TINY)
    return peak * mx.sqrt(mx.square(x / peak).mean(axis=-1, keepdims=True))


def normalise_shift_normalise(
    x: mx.array, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """`z` (..., T, D) fp32 of RMS 1, and `s1`, `m`, `s2` with `x = s1 (s2 z + m)`.

    Scales are rounded to `dtype` before they are used, so that the inverse loses nothing; `m`
    (..., 1, D) stays in fp32. A token of zeros has `s1` 0.
    """
    x = x.astype(mx.float32)
    s1 = saturated(root_mean_square(x), dtype)
    wide = s1.astype(mx.float32)
    y = mx.where(wide > 0, x / mx.maximum(wide, _TINY), 0.0)
    mean = y.mean(axis=-2, keepdims=True)
    y = y - mean
    s2 = mx.maximum(root_mean_square(y), _FLOOR).astype(dtype)
    return y / s2.astype(mx.float32), s1, mean, s2


class NSNCodec(Shared):
    """Tokens as `a·u + c·m`, rotated.

    `w` (B, H, T, words) uint32 codes, `g` (B, H, T, words) uint32 signs at 2 bits, `a` and `c`
    (B, H, T, 1), `m` (B, H, T/chunk, D) in the input's type.
    """

    def __init__(self, dim: int, spec: NSNSpec) -> None:
        self.dim, self.spec = dim, spec
        self.n_sub = dim // spec.sub
        self.basis = hadamard(dim)
        kind: gaussian.Kind = "magnitude" if spec.bits == 2 else "signed"
        self.table = VectorTable(gaussian.centroids(1 << spec.sub, spec.sub, kind, spec.seed))
        names = ("w", "g", "a", "c") if spec.bits == 2 else ("w", "a", "c")
        self.axes = {name: TokenAxis(2) for name in names}
        self.axes["m"] = TokenAxis(2, 1, spec.chunk)

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D), n a multiple of the chunk; every chunk alone."""
        batch, heads, n, dim = x.shape
        chunks = x.reshape(batch, heads, n // self.spec.chunk, self.spec.chunk, dim)
        z, s1, mean, s2 = normalise_shift_normalise(chunks, x.dtype)
        u = self.basis.rotate(z.reshape(x.shape))
        packed: Packed = {}
        if self.spec.bits == 2:
            codes = self.table.nearest(mx.abs(u))
            positive = u >= 0
            packed = {"w": pack_codes(codes, self.spec.sub), "g": pack_codes(positive, 1)}
            hat = mx.where(positive, self.table.rows(codes), -self.table.rows(codes))
        else:
            codes = self.table.nearest(u)
            packed = {"w": pack_codes(codes, self.spec.sub)}
            hat = self.table.rows(codes)
        fit = (u * hat).sum(axis=-1, keepdims=True)
        fit = fit / mx.maximum(mx.square(hat).sum(axis=-1, keepdims=True), _TINY)
        wide = s1.astype(mx.float32) * s2.astype(mx.float32)
        packed["a"] = saturated(wide.reshape(batch, heads, n, 1) * fit, x.dtype)
        packed["c"] = s1.reshape(batch, heads, n, 1)
        packed["m"] = self.basis.rotate(mean.squeeze(-2)).astype(x.dtype)
        return packed

    def units(self, packed: Packed) -> mx.array:
        """Rotated rows without scales and means, (B, H, T, D) fp32."""
        rows = self.table.rows(unpack_codes(packed["w"], self.spec.sub, self.n_sub))
        if self.spec.bits == 2:
            rows = mx.where(unpack_codes(packed["g"], 1, self.dim), rows, -rows)
        return rows

    def _means(self, packed: Packed) -> mx.array:
        return mx.repeat(packed["m"].astype(mx.float32), self.spec.chunk, axis=2)

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        rows = self.units(packed) * packed["a"].astype(mx.float32)
        rows = rows + self._means(packed) * packed["c"].astype(mx.float32)
        return self.basis.unrotate(rows).astype(dtype)

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Products with rotated queries: codes by tiles, means once a chunk."""
        q = self.basis.rotate_query(q)
        parts = [q @ self.units(t).astype(q.dtype).swapaxes(-1, -2) for t in self._tiles(packed)]
        raw = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        means = mx.repeat(
            q @ packed["m"].astype(q.dtype).swapaxes(-1, -2), self.spec.chunk, axis=-1
        )
        a, c = (packed[name].astype(q.dtype).swapaxes(-1, -2) for name in ("a", "c"))
        return raw * a + means * c

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Sums in the rotated basis, rotated back once."""
        a, c = (packed[name].astype(w.dtype).swapaxes(-1, -2) for name in ("a", "c"))
        scaled, chunk = w * a, self.spec.chunk
        each = (w * c).reshape(*w.shape[:-1], w.shape[-1] // chunk, chunk).sum(axis=-1)
        out, start = each @ packed["m"].astype(w.dtype), 0
        for tile in self._tiles(packed):
            n = tile["w"].shape[2]
            out = out + scaled[..., start : start + n] @ self.units(tile).astype(w.dtype)
            start += n
        return self.basis.unrotate(out)

    def native(self, packed: Packed, start: int, stop: int) -> tuple[NativeRun, NativeRun]:
        """How the compiled kernel reads these rows: codes, and means as codes of whole rows."""
        spec = self.spec
        codes = NativeRun(
            VECTOR, packed["w"], start, stop, self.dim, spec.sub, spec.sub,
            scale=packed["a"], book=self.table.centroids, signs=packed.get("g"), basis=self.basis,
        )  # fmt: skip
        lead, capacity = packed["a"].shape[:2], packed["a"].shape[2]
        chunks = (mx.arange(capacity) // spec.chunk).astype(mx.uint32)
        means = NativeRun(
            VECTOR, mx.broadcast_to(chunks[:, None], (*lead, capacity, 1)), start, stop,
            self.dim, _CHUNK_BITS, self.dim,
            scale=packed["c"], book=packed["m"][:, :, None], basis=self.basis,
        )  # fmt: skip
        return codes, means

    def _tiles(self, packed: Packed) -> list[Packed]:
        """Codes of token ranges small enough that their decoded rows stay in cache."""
        n = packed["w"].shape[2]
        names = [name for name in ("w", "g") if name in packed]
        return [
            {name: packed[name][:, :, i : i + _TILE] for name in names} for i in range(0, n, _TILE)
        ]
