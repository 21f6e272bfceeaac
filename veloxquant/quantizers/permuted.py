"""Affine groups of reordered channels with shrunken ranges: the format of skvq.

A group that mixes wide and narrow channels spends its levels on the wide ones, so channels of
like range or like middle are put next to each other; and a range that is a little too small costs
its few extremes less than it gains for all others. Both are fitted to the first tokens of a store,
for each head by itself. Queries are reordered, keys never back; sums of values are, once.
Source: SKVQ (arXiv 2405.06219), sections 3.2 and 3.3. Differs: channels are reordered within a KV
head; of two orders, by range and by middle, the one with the smaller error is taken instead of
clusters; ranges shrink about their middle, by a factor of each head.
"""

import mlx.core as mx

from veloxquant.kernels.native import NativeRun
from veloxquant.quantizers.affine import AffineTokenCodec
from veloxquant.quantizers.base import Packed, Shared, is_order
from veloxquant.quantizers.fitted import for_batch
from veloxquant.quantizers.specs.grouped import PermutedSpec, index_bytes

CLIP_FACTORS = tuple(round(1.0 - 0.05 * i, 2) for i in range(9))
"""Factors that a search tries, largest first."""


class HeadOrder:
    """An order of channels for each head, as the map between rows and coded rows."""

    def __init__(self, order: mx.array) -> None:
        self.order = order
        """(B, H, 1, D): the model's channel at each coded place."""

    def rotate_query(self, q: mx.array) -> mx.array:
        """Channels of (B, H, M, D) in coded order."""
        return mx.take_along_axis(q, self.order, axis=-1)

    def unrotate(self, x: mx.array) -> mx.array:
        """Inverse of `rotate_query`."""
        return mx.take_along_axis(x, mx.argsort(self.order, axis=-1), axis=-1)


def channel_orders(x: mx.array) -> tuple[mx.array, mx.array]:
    """Channels of fp32 rows (..., N, D) by range and by middle, ascending: two (..., 1, D) uint32.

    Equal channels keep their order.
    """
    low, high = x.min(axis=-2, keepdims=True), x.max(axis=-2, keepdims=True)
    return mx.argsort(high - low, axis=-1), mx.argsort(high / 2 + low / 2, axis=-1)


def clipped(x: mx.array, group: int, factor: mx.array | float) -> mx.array:
    """Rows with the range of every group of channels shrunk about its middle.

    Args:
        x: (..., D) fp32; a last group may be short.
        group: channels that share a range.
        factor: share of the range that is left; broadcasts to (..., groups, group).
    """
    *lead, dim = x.shape
    missing = -dim % group
    if missing:
        x = mx.concatenate([x, mx.repeat(x[..., -1:], missing, axis=-1)], axis=-1)
    groups = x.reshape(*lead, -1, group)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    middle, half = high / 2 + low / 2, (high / 2 - low / 2) * factor
    out = mx.clip(groups, middle - half, middle + half).reshape(*lead, -1)
    return out[..., :dim]


class PermutedCodec(Shared):
    """`w`, `s`, `b` of reordered rows; `order` (B, H, 1, D) and `clip` (B, H, 1, 1) a store.

    `given` are such constants of one sequence, (1, H, ...), to take instead of fitted ones.
    """

    def __init__(self, dim: int, spec: PermutedSpec, given: Packed | None = None) -> None:
        self.dim, self.spec, self.given = dim, spec, given or {}
        self.inner = AffineTokenCodec(dim, spec.rows)
        self.axes = self.inner.axes
        self.limits = {"order": dim} if spec.reorder else {}
        self._index = mx.uint8 if index_bytes(dim) == 1 else mx.uint16

    # ---- coding -------------------------------------------------------------------------

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D) in the model's order with the given factor."""
        return self.encode_fitted(x, {})

    def fit(self, x: mx.array) -> Packed:
        """Order and factor of every head for rows (B, H, n, D)."""
        if self.given:
            return for_batch(self.given, x.shape[0])
        dtype, x = x.dtype, x.astype(mx.float32)
        out: Packed = {}
        if self.spec.reorder:
            ways = channel_orders(x)
            lost = [self._lost(mx.take_along_axis(x, way, axis=-1), 1.0, dtype) for way in ways]
            order = mx.where(lost[1] < lost[0], ways[1], ways[0])
            out["order"] = order.astype(self._index)
            x = mx.take_along_axis(x, order, axis=-1)
        if self.spec.search:
            best = mx.full((*x.shape[:2], 1, 1), self.spec.clip)
            least = self._lost(x, self.spec.clip, dtype)
            for factor in CLIP_FACTORS:
                if factor < self.spec.clip:
                    lost = self._lost(x, factor, dtype)
                    best, least = mx.where(lost < least, factor, best), mx.minimum(lost, least)
            out["clip"] = best
        return out

    def fault(self, packed: Packed) -> str | None:
        """An order that is none."""
        if "order" not in packed or is_order(packed["order"]):
            return None
        return "array 'order' is damaged: it is no order of the channels"

    def _lost(self, x: mx.array, factor: float, dtype: mx.Dtype) -> mx.array:
        """Squared error of reordered fp32 rows with one factor: (B, H, 1, 1)."""
        packed = self.inner.encode(clipped(x, self.spec.group, factor).astype(dtype))
        error = mx.square(self.inner.decode(packed, mx.float32) - x)
        return error.mean(axis=(-1, -2), keepdims=True)

    def encode_fitted(self, x: mx.array, fitted: Packed) -> Packed:
        """Pack (B, H, n, D) with the order and the factor of its store."""
        if "order" in fitted:
            x = mx.take_along_axis(x, fitted["order"], axis=-1)
        factor = fitted["clip"][..., None] if "clip" in fitted else self.spec.clip
        if "clip" in fitted or self.spec.clip < 1:
            x = clipped(x.astype(mx.float32), self.spec.group, factor).astype(x.dtype)
        return self.inner.encode(x)

    # ---- products -----------------------------------------------------------------------

    def _order(self, packed: Packed) -> HeadOrder | None:
        return HeadOrder(packed["order"]) if "order" in packed else None

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """q·Kᵀ with reordered queries."""
        order = self._order(packed)
        return self.inner.scores(order.rotate_query(q) if order else q, packed)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """w·V, put back in the model's order once."""
        order, out = self._order(packed), self.inner.mix(w, packed)
        return order.unrotate(out) if order else out

    def native(self, packed: Packed, start: int, stop: int) -> NativeRun:
        """How the compiled kernel reads these rows: affine rows in a basis of the store's own."""
        return self.inner.native(packed, start, stop)._replace(basis=self._order(packed))

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        order, rows = self._order(packed), self.inner.decode(packed, dtype)
        return order.unrotate(rows) if order else rows
