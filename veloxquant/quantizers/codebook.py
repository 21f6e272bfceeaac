"""Rotated scalar codebooks: the format of turboquant_mse and turboquant_rvq.

A vector is divided by its norm, rotated and coded coordinate by coordinate with one fixed table:
after the rotation every coordinate follows nearly N(0, 1/D), whatever the vector was.
Source: TurboQuant (arXiv 2504.19874); the embedded table is derived in `math/lloyd_max.py`.
"""

import itertools
import math
from collections.abc import Sequence

import mlx.core as mx

from veloxquant.kernels import encode
from veloxquant.kernels.native import NativeRun
from veloxquant.math.lloyd_max import embedded_levels, normal_levels
from veloxquant.quantizers.base import Packed, Shared, TokenAxis
from veloxquant.quantizers.code_table import CodeTable
from veloxquant.quantizers.rotation import Orthogonal, Rotation, rotation
from veloxquant.quantizers.specs.codebook import CodebookSpec

TINY = 1e-30
Levels = tuple[Sequence[float], Sequence[float]]


def levels_of(bits: int, table: str) -> Levels:
    """Levels and thresholds of unit variance; `table` is "flat" (Lloyd–Max) or "embedded"."""
    if table == "embedded":
        return embedded_levels(bits)
    return with_thresholds(normal_levels(bits))


def with_thresholds(levels: Sequence[float]) -> Levels:
    """Levels and the midpoints between them."""
    return levels, tuple((a + b) / 2 for a, b in itertools.pairwise(levels))


def narrow(dtype: mx.Dtype) -> mx.Dtype:
    """Type of norms: bf16 for 16-bit rows, since fp16 ends at 65504, fp32 for fp32 rows."""
    return mx.float32 if dtype == mx.float32 else mx.bfloat16


def unit_and_norm(x: mx.array) -> tuple[mx.array, mx.array]:
    """Rows (..., D) as fp32 unit vectors and norms (..., 1); zero rows give zeros."""
    x = x.astype(mx.float32)
    # Two steps, so that squares of large coordinates stay finite.
    peak = mx.abs(x).max(axis=-1, keepdims=True)
    unit = x / mx.maximum(peak, TINY)
    length = mx.sqrt(mx.square(unit).sum(axis=-1, keepdims=True))
    norm = mx.where(peak > TINY, peak * length, 0.0)
    return unit / mx.maximum(length, TINY), norm


class CodebookCodec(Shared):
    """`w` (B, H, T, words) uint32 and `n` (B, H, T, 1): codes and the norm of each token.

    `basis` and `levels` replace the seeded rotation and the computed table, for those that come
    from an artifact store.
    """

    def __init__(
        self,
        dim: int,
        spec: CodebookSpec,
        basis: Orthogonal | None = None,
        levels: Sequence[float] | None = None,
    ) -> None:
        self.dim, self.spec = dim, spec
        self.axes = {"w": TokenAxis(2), "n": TokenAxis(2)}
        self.rotation = basis or rotation(dim, spec.seed)
        pair = levels_of(spec.bits, spec.table) if levels is None else with_thresholds(levels)
        self.table = CodeTable(dim, spec.bits, *pair, scale=1 / math.sqrt(dim))

    # ---- coding -------------------------------------------------------------------------

    def encode(self, x: mx.array, dtype: mx.Dtype | None = None) -> Packed:
        """Pack (B, H, n, D) for any n; every token alone. Norms in `dtype`, else `narrow`."""
        dtype, table = dtype or narrow(x.dtype), self.table
        if isinstance(self.rotation, Rotation):
            coded = encode.rotated(
                x, bits=self.spec.bits, unbiased=self.spec.unbiased, signs=self.rotation.signs,
                thresholds=table.cuts, levels=table.unit_table,
            )  # fmt: skip
            if coded is not None:
                return {"w": coded[0], "n": coded[1].astype(dtype)}
        unit, norm = unit_and_norm(x)
        y = self.rotation.rotate(unit) * math.sqrt(self.dim)
        codes = table.codes(y)
        norm = norm * corrected(y, table.look_up(codes), unbiased=self.spec.unbiased)
        return {"w": table.pack(codes), "n": norm.astype(dtype)}

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D) in the original basis."""
        return self.rotation.unrotate(self.table.rows(packed["w"], packed["n"])).astype(dtype)

    # ---- products -----------------------------------------------------------------------

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Products with rotated queries; keys are never rotated back."""
        return self.table.scores(self.rotation.rotate_query(q), packed["w"], packed["n"])

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Sum in the rotated basis, rotated back once."""
        return self.rotation.unrotate(self.table.mix(w, packed["w"], packed["n"]))

    def native(self, packed: Packed, start: int, stop: int) -> NativeRun:
        """How the compiled kernel reads these rows: queries and sums are in the rotated basis."""
        return self.table.native(packed["w"], packed["n"], start, stop, self.rotation, self.dim)


def corrected(y: mx.array, hat: mx.array, *, unbiased: bool) -> mx.array:
    """Factor on the norm of rows y coded as `hat`, both with coordinates of unit variance.

    For keys the one that leaves inner products unbiased, for values the one of least squared error.
    """
    inner = (y * hat).sum(axis=-1, keepdims=True)
    if unbiased:
        dim = y.shape[-1]
        return dim / mx.maximum(inner, 1e-6 * dim)
    return inner / mx.maximum(mx.square(hat).sum(axis=-1, keepdims=True), TINY)
