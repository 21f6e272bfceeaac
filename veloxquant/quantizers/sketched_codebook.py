"""A rotated codebook with a sign sketch of what it leaves over: unbiased inner products.

Codes of least squared error shrink inner products; the residual's sketch, whose estimate is
unbiased, makes up for that. Source: TurboQuant (arXiv 2504.19874), algorithm 2.
"""

import math
from collections.abc import Sequence

import mlx.core as mx

from veloxquant.kernels.native import NativeRun
from veloxquant.quantizers.base import Packed, Shared, TokenAxis
from veloxquant.quantizers.code_table import CodeTable
from veloxquant.quantizers.codebook import levels_of, narrow, unit_and_norm, with_thresholds
from veloxquant.quantizers.rotation import Orthogonal, rotation
from veloxquant.quantizers.sketch import AnySketch, SignCode, sketch
from veloxquant.quantizers.specs.sketch import SketchedCodebookSpec


class SketchedCodebookCodec(Shared):
    """`w`, `n`: codes and norms; `z`, `g`: signs of the residual and its norm.

    At one bit there are no codes, and the residual is the vector itself.
    """

    def __init__(
        self,
        dim: int,
        spec: SketchedCodebookSpec,
        basis: Orthogonal | None = None,
        levels: Sequence[float] | None = None,
        given: AnySketch | None = None,
    ) -> None:
        self.dim, self.spec = dim, spec
        names = ("w", "n", "z", "g") if spec.bits > 1 else ("z", "g")
        self.axes = {name: TokenAxis(2) for name in names}
        projections = given or sketch(dim, spec.rows or dim, spec.seed)
        self.table: CodeTable | None = None
        self.rotation = basis or rotation(dim, spec.seed)
        if spec.bits > 1:
            bits = spec.bits - 1
            pair = levels_of(bits, "flat") if levels is None else with_thresholds(levels)
            self.table = CodeTable(dim, bits, *pair, scale=1 / math.sqrt(dim))
            # The sketch acts on the rotated residual, which saves rotating it back.
            self.signs = SignCode(projections, self.rotation.matrix)
        else:
            self.signs = SignCode(projections)

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) for any n; every token alone."""
        dtype = narrow(x.dtype)
        unit, norm = unit_and_norm(x)
        if self.table is None:
            return {"z": self.signs.encode(unit), "g": norm.astype(dtype)}
        root = math.sqrt(self.dim)
        y = self.rotation.rotate(unit) * root
        codes = self.table.codes(y)
        rest = (y - self.table.look_up(codes)) / root
        left = mx.sqrt(mx.square(rest).sum(axis=-1, keepdims=True))
        return {
            "w": self.table.pack(codes),
            "n": norm.astype(dtype),
            "z": self.signs.encode(rest),
            "g": (norm * left).astype(dtype),
        }

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Unbiased estimates: products with the codes plus those of the sketch."""
        out = self.signs.scores(q, packed["z"], packed["g"])
        if self.table is None:
            return out
        return out + self.table.scores(self.rotation.rotate_query(q), packed["w"], packed["n"])

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Weighted sums of what `decode` gives."""
        out = self.signs.mix(w, packed["z"], packed["g"])
        if self.table is None:
            return out
        return out + self.rotation.unrotate(self.table.mix(w, packed["w"], packed["n"]))

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows whose products with a query are the estimates; their squared error is larger."""
        out = self.signs.decode(packed["z"], packed["g"])
        if self.table is not None:
            out = out + self.rotation.unrotate(self.table.rows(packed["w"], packed["n"]))
        return out.astype(dtype)

    def native(self, packed: Packed, start: int, stop: int) -> tuple[NativeRun, ...]:
        """Codes and signs, two parts of the same tokens that add up."""
        signs = self.signs.native(packed["z"], packed["g"], start, stop)
        if self.table is None:
            return signs
        codes = self.table.native(packed["w"], packed["n"], start, stop, self.rotation, self.dim)
        return (codes, *signs)
