"""Affine groups whose error is corrected: low-rank factors a block, exact extremes a vector.

`x ≈ backbone + a·m + sparse`. Extremes are set aside before the backbone is coded, so its grids are
narrower; the factors then take the coherent part of the rounding error. All three parts add up, so
products with them do, too.
Source: GEAR (arXiv 2403.05527).
"""

import math

import mlx.core as mx

from veloxquant.quantizers import slots
from veloxquant.quantizers.base import Packed, Shared, TokenAxis
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.lowrank import low_rank
from veloxquant.quantizers.specs.coded import CorrectedSpec


class CorrectedCodec(Shared):
    """The backbone's arrays and the corrections of N blocks of C tokens, rank r, n slots.

    `a` (B, H, T, r) and `m` (B, H, N, r, D), factors; `sv` and `si`, values and places of the exact
    entries, (B, H, N, D, n) along tokens or (B, H, T, n) along channels; `e` (B, H, N, 2) fp32,
    squared rounding error without and with the factors.
    """

    def __init__(self, dim: int, spec: CorrectedSpec) -> None:
        self.dim, self.spec = dim, spec
        self.base = codec_for(spec.base, dim)
        self.rank, self.slots = spec.rank_for(dim), spec.slots(dim)
        by_block = TokenAxis(2, 1, spec.block)
        by_vector = by_block if spec.along_tokens else TokenAxis(2)
        self.axes = dict(self.base.axes)
        if self.rank:
            self.axes |= {"a": TokenAxis(2), "m": by_block, "e": by_block}
        if self.slots:
            self.axes |= {"sv": by_vector, "si": by_vector}

    def _blocks(self, x: mx.array) -> mx.array:
        """(B, H, T, ...) cut into (B, H, N, C, ...)."""
        batch, heads, tokens, *rest = x.shape
        return x.reshape(batch, heads, tokens // self.spec.block, self.spec.block, *rest)

    def _vectors(self, x: mx.array) -> mx.array:
        """Coded vectors as the last axis: (B, H, N, D, C) or (B, H, T, D)."""
        return self._blocks(x).swapaxes(-1, -2) if self.spec.along_tokens else x

    def _rows(self, y: mx.array) -> mx.array:
        """Inverse of `_vectors`."""
        if not self.spec.along_tokens:
            return y
        batch, heads, blocks, dim, size = y.shape
        return y.swapaxes(-1, -2).reshape(batch, heads, blocks * size, dim)

    # ---- coding -------------------------------------------------------------------------

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D), n a multiple of the block."""
        dtype, x = x.dtype, x.astype(mx.float32)
        index = None
        filled = x
        if self.slots:
            y = self._vectors(x)
            index = slots.extremes(y, self.slots)
            filled = self._rows(slots.fill_with_mean(y, index))
        packed = self.base.encode(filled.astype(dtype))
        coded = self.base.decode(packed, mx.float32)
        if self.rank:
            packed |= self._factors(filled - coded, dtype)
            coded = coded + self._product(packed)
        if index is not None:
            lost = mx.take_along_axis(self._vectors(x - coded), index, axis=-1)
            packed["sv"] = lost.astype(dtype)
            packed["si"] = slots.narrow(index, self.spec.vector(self.dim))
        return packed

    def _factors(self, error: mx.array, dtype: mx.Dtype) -> Packed:
        blocks = self._blocks(error)
        left, right = low_rank(blocks, self.rank)
        # Entries near one on the left and no larger than the error on the right: neither
        # overflows in 16 bits.
        even = math.sqrt(self.spec.block)
        left, right = (left * even).astype(dtype), (right / even).astype(dtype)
        remaining = blocks - left.astype(mx.float32) @ right.astype(mx.float32)
        energy = [mx.square(part).sum(axis=(-1, -2)) for part in (blocks, remaining)]
        batch, heads, count, size, rank = left.shape
        return {
            "a": left.reshape(batch, heads, count * size, rank),
            "m": right,
            "e": mx.stack(energy, axis=-1),
        }

    def _product(self, packed: Packed) -> mx.array:
        """The low-rank part as rows, fp32."""
        blocks = self._blocks(packed["a"].astype(mx.float32)) @ packed["m"].astype(mx.float32)
        batch, heads, count, size, dim = blocks.shape
        return blocks.reshape(batch, heads, count * size, dim)

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        rows = self.base.decode(packed, mx.float32)
        if self.rank:
            rows = rows + self._product(packed)
        if self.slots:
            exact = slots.added(self._vectors(rows), packed["si"], packed["sv"])
            rows = self._rows(exact)
        return rows.astype(dtype)

    # ---- products -----------------------------------------------------------------------

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """The sum of the products with each part."""
        out = self.base.scores(q, packed)
        if self.rank:
            out = out + self._low_rank_scores(q, packed)
        if self.slots:
            out = out + self._sparse_scores(q, packed)
        return out

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """The sum of the weighted sums of each part."""
        out = self.base.mix(w, packed)
        if self.rank:
            out = out + self._low_rank_mix(w, packed)
        if self.slots:
            out = out + self._sparse_mix(w, packed)
        return out

    def native(self, packed: Packed, start: int, stop: int) -> None:
        """None: the kernel does not read sparse entries."""
        del packed, start, stop

    def _weights(self, w: mx.array) -> mx.array:
        """(B, H, M, T) cut into (B, H, N, M, C)."""
        batch, heads, rows, tokens = w.shape
        cut = w.reshape(batch, heads, rows, tokens // self.spec.block, self.spec.block)
        return cut.swapaxes(2, 3)

    def _low_rank_scores(self, q: mx.array, packed: Packed) -> mx.array:
        batch, heads, count, rank, dim = packed["m"].shape
        right = packed["m"].astype(q.dtype).reshape(batch, heads, count * rank, dim)
        seen = (q @ right.swapaxes(-1, -2)).reshape(batch, heads, -1, count, rank).swapaxes(2, 3)
        out = seen @ self._blocks(packed["a"].astype(q.dtype)).swapaxes(-1, -2)
        return out.swapaxes(2, 3).reshape(batch, heads, -1, count * self.spec.block)

    def _low_rank_mix(self, w: mx.array, packed: Packed) -> mx.array:
        batch, heads, count, rank, dim = packed["m"].shape
        right = packed["m"].astype(w.dtype).reshape(batch, heads, count * rank, dim)
        seen = self._weights(w) @ self._blocks(packed["a"].astype(w.dtype))
        return seen.swapaxes(2, 3).reshape(batch, heads, -1, count * rank) @ right

    def _sparse_scores(self, q: mx.array, packed: Packed) -> mx.array:
        if not self.spec.along_tokens:
            return slots.gathered(q, packed["si"], packed["sv"])
        batch, heads, count = packed["si"].shape[:3]
        size = self.spec.block
        every = mx.broadcast_to(q[:, :, None], (batch, heads, count, *q.shape[2:]))
        out = slots.scattered(every, packed["si"], packed["sv"], size)
        return out.swapaxes(2, 3).reshape(batch, heads, -1, count * size)

    def _sparse_mix(self, w: mx.array, packed: Packed) -> mx.array:
        if not self.spec.along_tokens:
            return slots.scattered(w, packed["si"], packed["sv"], self.dim)
        return slots.gathered(self._weights(w), packed["si"], packed["sv"]).sum(axis=2)
