"""Affine groups whose error is corrected: low-rank factors a block, exact entries of a token.

`x ≈ backbone + a·m + sparse`. Outliers are set aside before the backbone is coded, so its grids are
narrower; the factors then take the coherent part of the rounding error. All three parts add up, so
products with them do, too.
Source: GEAR (arXiv 2403.05527). Differs: outliers of keys are picked token by token, as those of
values are, by their distance in standard deviations of their channel; the paper picks extremes of
each channel. Error alike (0.85 against 0.82 of the backbone's with loud channels, 0.61 against 0.63
with heavy tails), and every token has the same slots; up to an eighth of a full rank factors have
8 bits, which adds less than 0.1 % to the squared error at the default rank and 0.2 % at an eighth.
"""

import mlx.core as mx

from veloxquant.kernels.native import MAX_DIM, SPARSE, NativeRun
from veloxquant.quantizers import slots, sparse
from veloxquant.quantizers.base import NativeParts, Packed, Shared, TokenAxis
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.finite import in_the_middle
from veloxquant.quantizers.lowrank import low_rank
from veloxquant.quantizers.specs.coded import CorrectedSpec

_TOP = 127
"""Largest code of a factor."""
_TINY = 1e-30
_NOWHERE = 65_535
"""A channel that no run has: an empty slot."""


class CorrectedCodec(Shared):
    """The backbone's arrays and the corrections of N blocks of C tokens, rank r, n slots.

    `a` (B, H, T, r) and `m` (B, H, N, r, D), factors, int8 while they are few, and `ms`
    (B, H, N, r, 1) fp32, the step of their products; `sv` and `si` (B, H, T, n), values and
    channels of the exact entries; `e` (B, H, N, 2) fp32, squared rounding error without and with
    the factors.
    """

    def __init__(self, dim: int, spec: CorrectedSpec) -> None:
        self.dim, self.spec = dim, spec
        self.base = codec_for(spec.base, dim)
        self.rank, self.slots = spec.rank_for(dim), spec.slots(dim)
        by_block = TokenAxis(2, 1, spec.block)
        self.axes = dict(self.base.axes)
        if self.rank:
            self.axes |= {"a": TokenAxis(2), "m": by_block, "ms": by_block, "e": by_block}
        if self.slots:
            self.axes |= {"sv": TokenAxis(2), "si": TokenAxis(2)}
            self.limits = {"si": dim}

    def _blocks(self, x: mx.array) -> mx.array:
        """(B, H, T, ...) cut into (B, H, N, C, ...)."""
        batch, heads, tokens, *rest = x.shape
        return x.reshape(batch, heads, tokens // self.spec.block, self.spec.block, *rest)

    # ---- coding -------------------------------------------------------------------------

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D), n a multiple of the block."""
        dtype, x = x.dtype, self._finite(x.astype(mx.float32))
        at = self._outliers(x) if self.slots else None
        inliers = x if at is None else slots.filled(x, at, self._span)
        packed = self.base.encode(inliers.astype(dtype))
        coded = self.base.decode(packed, mx.float32)
        if self.rank:
            packed |= self._factors(inliers - coded, dtype)
            coded = coded + self._product(packed)
        if at is not None:
            packed["sv"] = sparse.missed(x, coded, at, dtype)
            packed["si"] = slots.narrow(at, self.dim)
        return packed

    @property
    def _span(self) -> int:
        """Tokens that share a scale."""
        return self.spec.base.group if self.spec.along_tokens else 1

    def _finite(self, x: mx.array) -> mx.array:
        """Rows without entries that are no numbers.

        One of these would take the factors of its block, and every row of it, along.
        """
        axis = 3 if self.spec.along_tokens else -1
        return in_the_middle(self._blocks(x), axis).reshape(x.shape)

    def _outliers(self, x: mx.array) -> mx.array:
        """Channels of each token that widen the grids most: (B, H, T, slots)."""
        if self.spec.along_tokens:
            return slots.farthest(x, self.slots, self.spec.block)
        return slots.extremes(x, self.slots)

    def _factors(self, error: mx.array, dtype: mx.Dtype) -> Packed:
        blocks = self._blocks(error)
        kind = mx.int8 if self.spec.factors_coded(self.dim) else dtype
        left, right = low_rank(blocks, self.rank)
        left, down = _in_steps(left, -2, kind)
        right, along = _in_steps(right, -1, kind)
        scale = along * down.swapaxes(-1, -2)
        remaining = blocks - left.astype(mx.float32) @ (right.astype(mx.float32) * scale)
        energy = [mx.square(part).sum(axis=(-1, -2)) for part in (blocks, remaining)]
        batch, heads, count, size, rank = left.shape
        return {
            "a": left.reshape(batch, heads, count * size, rank),
            "m": right,
            "ms": scale,
            "e": mx.stack(energy, axis=-1),
        }

    def _product(self, packed: Packed) -> mx.array:
        """The low-rank part as rows, fp32."""
        right = packed["m"].astype(mx.float32) * packed["ms"]
        blocks = self._blocks(packed["a"].astype(mx.float32)) @ right
        batch, heads, count, size, dim = blocks.shape
        return blocks.reshape(batch, heads, count * size, dim)

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        rows = self.base.decode(packed, mx.float32)
        if self.rank:
            rows = rows + self._product(packed)
        if self.slots:
            rows = sparse.corrected(rows, packed["si"].astype(mx.uint32), packed["sv"])
        return rows.astype(dtype)

    # ---- products -----------------------------------------------------------------------

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """The sum of the products with each part."""
        out = self.base.scores(q, packed)
        if self.rank:
            out = out + self._low_rank_scores(q, packed)
        if self.slots:
            out = out + slots.gathered(q, packed["si"], packed["sv"])
        return out

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """The sum of the weighted sums of each part."""
        out = self.base.mix(w, packed)
        if self.rank:
            out = out + self._low_rank_mix(w, packed)
        if self.slots:
            out = out + slots.scattered(w, packed["si"], packed["sv"], self.dim)
        return out

    def native(self, packed: Packed, start: int, stop: int) -> NativeParts | None:
        """Backbone, factors and exact entries as parts that add up; None for too many factors."""
        if self.rank > MAX_DIM:
            return None
        base = self.base.native(packed, start, stop)
        assert isinstance(base, NativeRun)
        parts = [base]
        if self.rank:
            parts += self._factor_runs(packed, start, stop)
        if self.slots:
            parts.append(
                NativeRun(SPARSE, packed["si"], start, stop, self.slots, scale=packed["sv"])
            )
        return tuple(parts)

    def _factor_runs(self, packed: Packed, start: int, stop: int) -> list[NativeRun]:
        """Factors as sparse rows: token t is `a` at the channels of its block, in their basis."""
        left, right, scale = (packed[name] for name in ("a", "m", "ms"))
        batch, heads, count, rank, _ = right.shape
        place = mx.arange(count * self.spec.block) // self.spec.block * rank
        place = place[:, None] + mx.arange(rank)
        most = MAX_DIM // rank
        runs = []
        for low in range(start // self.spec.block, -(-stop // self.spec.block), most):
            high = min(low + most, count)
            dim = (high - low) * rank
            inside = (place >= low * rank) & (place < high * rank)
            channel = mx.where(inside, place - low * rank, _NOWHERE).astype(mx.uint16)
            data = mx.broadcast_to(channel, (batch, heads, *channel.shape))
            basis = _Factors(right[:, :, low:high], scale[:, :, low:high])
            runs.append(
                NativeRun(SPARSE, data, start, stop, rank, scale=left, basis=basis, dim=dim)
            )
        return runs

    def _weights(self, w: mx.array) -> mx.array:
        """(B, H, M, T) cut into (B, H, N, M, C)."""
        batch, heads, rows, tokens = w.shape
        cut = w.reshape(batch, heads, rows, tokens // self.spec.block, self.spec.block)
        return cut.swapaxes(2, 3)

    def _low_rank_scores(self, q: mx.array, packed: Packed) -> mx.array:
        batch, heads, count, rank, _ = packed["m"].shape
        seen = _Factors(packed["m"], packed["ms"]).rotate_query(q)
        seen = seen.reshape(batch, heads, -1, count, rank).swapaxes(2, 3)
        out = seen @ self._blocks(packed["a"].astype(q.dtype)).swapaxes(-1, -2)
        return out.swapaxes(2, 3).reshape(batch, heads, -1, count * self.spec.block)

    def _low_rank_mix(self, w: mx.array, packed: Packed) -> mx.array:
        batch, heads, count, rank, _ = packed["m"].shape
        seen = self._weights(w) @ self._blocks(packed["a"].astype(w.dtype))
        seen = seen.swapaxes(2, 3).reshape(batch, heads, -1, count * rank)
        return _Factors(packed["m"], packed["ms"]).unrotate(seen)


def _in_steps(factors: mx.array, axis: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Factors up to 127 in size in a type, whole ones in int8, and the fp32 step along `axis`."""
    scale = mx.abs(factors).max(axis=axis, keepdims=True) / _TOP
    steps = factors / mx.maximum(scale, _TINY)
    return (mx.round(steps) if dtype == mx.int8 else steps).astype(dtype), scale


class _Factors:
    """The map between channels and the right factors of some blocks, one after the other."""

    def __init__(self, right: mx.array, scale: mx.array) -> None:
        batch, heads, count, rank, dim = right.shape
        self.right = right.reshape(batch, heads, count * rank, dim)
        self.scale = scale.reshape(batch, heads, 1, count * rank)

    def rotate_query(self, q: mx.array) -> mx.array:
        """Products with every right factor."""
        return q @ self.right.astype(q.dtype).swapaxes(-1, -2) * self.scale.astype(q.dtype)

    def unrotate(self, x: mx.array) -> mx.array:
        """Right factors summed with these weights."""
        return (x * self.scale.astype(x.dtype)) @ self.right.astype(x.dtype)
