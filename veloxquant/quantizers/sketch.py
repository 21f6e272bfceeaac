"""Sign sketches of keys: the signs of random projections and the norm, nothing else.

For s with independent normal entries E[sign(s·k) s·q] = sqrt(2/π) q·k/|k|, so that a mean over
signs, with the query unquantised, is an unbiased estimate of q·k.
Source: QJL (arXiv 2406.03482). Rows come in orthogonal blocks, which cuts the variance threefold.
"""

import math
from functools import lru_cache

import mlx.core as mx
import numpy as np

from veloxquant.core.constants import SQRT_PI_OVER_2
from veloxquant.kernels.native import MAX_DIM, NativeRun
from veloxquant.math.rotation import make_rotation_matrix
from veloxquant.quantizers.base import Packed, Shared, TokenAxis
from veloxquant.quantizers.code_table import CodeTable
from veloxquant.quantizers.codebook import narrow, unit_and_norm
from veloxquant.quantizers.rotation import Matrix, Orthogonal, rotation
from veloxquant.quantizers.specs.sketch import SketchSpec

_SMALL = 32
"""Sizes below which a Hadamard transform has too few sign patterns."""
_BLOCK_SEED = 15_485_863


class Sketch:
    """`rows` projections of R^dim, each of length sqrt(dim): orthogonal blocks, the last one cut.

    `weight` turns a sum of signs times projected queries into the estimate, for unit keys.
    """

    def __init__(self, dim: int, rows: int, seed: int) -> None:
        self.dim, self.rows = dim, rows
        seeds = [seed + _BLOCK_SEED * (i + 1) for i in range(-(-rows // dim))]
        self._blocks: list[Orthogonal] = [
            Matrix(make_rotation_matrix(dim, s)) if dim < _SMALL else rotation(dim, s)
            for s in seeds
        ]
        stacked = mx.concatenate([b.matrix for b in self._blocks]) * math.sqrt(dim)
        self.matrix = mx.contiguous(stacked[:rows])
        # E|s·u| of a row of an orthogonal block: sqrt(2/π) but for a factor 1 + 1/(4·dim).
        mean = math.sqrt(dim / math.pi) * math.exp(
            math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)
        )
        self.weight = 1 / (rows * mean)
        mx.eval(self.matrix)

    def rotate(self, x: mx.array) -> mx.array:
        """Projections (..., rows) of fp32 rows (..., dim) that are stored."""
        parts = [block.rotate(x) for block in self._blocks]
        whole = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        return whole[..., : self.rows] * math.sqrt(self.dim)

    def __deepcopy__(self, memo: object) -> "Sketch":
        """Constants are shared by copies."""
        return self


class GaussianSketch(Matrix):
    """A given matrix (rows, dim) of independent normal entries."""

    def __init__(self, matrix: mx.array | np.ndarray) -> None:
        super().__init__(matrix)
        self.weight = SQRT_PI_OVER_2 / self.matrix.shape[0]


AnySketch = Sketch | GaussianSketch


@lru_cache(maxsize=32)
def sketch(dim: int, rows: int, seed: int) -> Sketch:
    """The shared sketch of one size and seed."""
    return Sketch(dim, rows, seed)


class SignCode:
    """Packed signs of a sketch and products with them.

    `before` is the matrix of the basis that the sketch acts in, None for the model's own.
    """

    def __init__(self, sketch: AnySketch, before: mx.array | None = None) -> None:
        self._sketch = sketch
        whole = sketch.matrix if before is None else sketch.matrix @ before
        self.rows = whole.shape[-2]
        self.table = CodeTable(self.rows, 1, (-1.0, 1.0), (0.0,), sketch.weight)
        self.map = Matrix(whole)
        # The kernel reads a limited number of rows at a time; parts add up.
        cuts = range(0, self.rows, MAX_DIM)
        self._parts = [(i // 32, self._part(i)) for i in cuts] if len(cuts) > 1 else []

    def _part(self, start: int) -> tuple[CodeTable, Matrix]:
        rows = self.map.matrix[..., start : start + MAX_DIM, :]
        table = CodeTable(rows.shape[-2], 1, (-1.0, 1.0), (0.0,), self.table.scale)
        return table, Matrix(mx.contiguous(rows))

    def encode(self, x: mx.array) -> mx.array:
        """Words of the signs of fp32 rows (B, H, n, D) in the sketch's basis; zero is positive."""
        return self.table.pack((self._sketch.rotate(x) >= 0).astype(mx.uint8))

    def scores(self, q: mx.array, words: mx.array, norm: mx.array) -> mx.array:
        """Estimated products of queries in the model's basis with keys of these norms."""
        return self.table.scores(self.map.rotate_query(q), words, norm)

    def mix(self, w: mx.array, words: mx.array, norm: mx.array) -> mx.array:
        """Weighted sums of decoded rows, in the model's basis."""
        return self.map.unrotate(self.table.mix(w, words, norm))

    def decode(self, words: mx.array, norm: mx.array) -> mx.array:
        """Rows whose products are the estimates; far from the rows themselves. fp32."""
        return self.map.unrotate(self.table.rows(words, norm))

    def native(
        self, words: mx.array, norm: mx.array, start: int, stop: int
    ) -> tuple[NativeRun, ...]:
        """As the compiled kernel reads them."""
        if not self._parts:
            return (self.table.native(words, norm, start, stop, self.map, self.rows),)
        return tuple(
            table.native(words[..., at : at + table.words], norm, start, stop, basis, table.width)
            for at, (table, basis) in self._parts
        )


class SketchCodec(Shared):
    """`z` (B, H, T, rows/32) uint32 and `n` (B, H, T, 1): signs and the norm of each key."""

    def __init__(self, dim: int, spec: SketchSpec, given: AnySketch | None = None) -> None:
        self.dim, self.spec = dim, spec
        self.axes = {"z": TokenAxis(2), "n": TokenAxis(2)}
        self.signs = SignCode(given or sketch(dim, spec.rows or dim, spec.seed))

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) for any n; every token alone."""
        unit, norm = unit_and_norm(x)
        return {"z": self.signs.encode(unit), "n": norm.astype(narrow(x.dtype))}

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Unbiased estimates of the products."""
        return self.signs.scores(q, packed["z"], packed["n"])

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Weighted sums of what `decode` gives."""
        return self.signs.mix(w, packed["z"], packed["n"])

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows whose products with a query are the estimates."""
        return self.signs.decode(packed["z"], packed["n"]).astype(dtype)

    def native(self, packed: Packed, start: int, stop: int) -> tuple[NativeRun, ...]:
        """How the compiled kernel reads these tokens."""
        return self.signs.native(packed["z"], packed["n"], start, stop)
