"""Caches whose stores hold neighbouring KV heads side by side, as one long row.

A query reads its own head out of a row when it is zero everywhere else, so everything that attends,
packs and saves works on such rows as on any others.
"""

from typing import Any

import mlx.core as mx

from veloxquant.cache.attend import Fresh, Run, attend
from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.layouts.latent import joined_shape
from veloxquant.cache.plans import LayerPlan
from veloxquant.cache.view import AttentionCall
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.sizes import LayerShape


def joined(x: mx.array, size: int) -> mx.array:
    """Rows (B, H, n, D) of `size` heads each as one: (B, H/size, n, size·D)."""
    if size == 1:
        return x
    batch, heads, n, dim = x.shape
    wide = x.reshape(batch, heads // size, size, n, dim).swapaxes(2, 3)
    return wide.reshape(batch, heads // size, n, size * dim)


def parted(x: mx.array, size: int) -> mx.array:
    """Inverse of `joined`."""
    if size == 1:
        return x
    batch, groups, n, wide = x.shape
    heads = x.reshape(batch, groups, n, size, wide // size).swapaxes(2, 3)
    return heads.reshape(batch, groups * size, n, wide // size)


def _places(x: mx.array, n_kv: int, size: int) -> mx.array:
    """(B, n_kv/size, size, R·L, ...) from (B, n_q, L, ...), one axis for the heads of a group."""
    batch, heads, length, dim = x.shape
    return x.reshape(batch, n_kv // size, size, heads // n_kv * length, dim)


def spread(q: mx.array, n_kv: int, size: int) -> mx.array:
    """Queries (B, n_q, L, D) at the place of their head in a joined row: (B, n_q, L, size·D)."""
    rows = _places(q, n_kv, size)
    own = mx.eye(size, dtype=q.dtype)[None, None, :, None, :, None]
    wide = rows[..., None, :] * own
    return wide.reshape(*q.shape[:3], size * q.shape[3])


def gathered(out: mx.array, n_kv: int, size: int) -> mx.array:
    """Each query's own head out of sums of joined rows: (B, n_q, L, size·D) to (B, n_q, L, D)."""
    rows = _places(out, n_kv, size)
    dim = out.shape[3] // size
    heads = rows.reshape(*rows.shape[:4], size, dim)
    own = mx.arange(size).reshape(1, 1, size, 1, 1, 1)
    index = mx.broadcast_to(own, (*rows.shape[:4], 1, dim))
    return mx.take_along_axis(heads, index, axis=4).reshape(*out.shape[:3], dim)


class JoinedHeads(ComposedCache):
    """Two streams of joined rows; `groups` of them, each of equally many heads.

    The plan and its codecs are those of the long rows.
    """

    def __init__(
        self,
        plan: LayerPlan,
        shape: LayerShape,
        groups: int,
        method: str,
        codecs: tuple[Codec | None, Codec | None] = (None, None),
    ) -> None:
        self.packs = shape.n_kv_heads // groups
        super().__init__(plan, joined_shape(shape, groups), method, codecs)

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Append joined rows to both streams."""
        super().write(joined(keys, self.packs), joined(values, self.packs))

    def runs(self) -> tuple[list[Run], list[Run]]:
        """The stores, then the pending rows, joined."""
        sides = super().runs()
        if self.pending is not None:
            for side, x in zip(sides, self.pending, strict=True):
                side[-1] = Fresh(joined(x, self.packs))
        return sides

    def _arrays(self) -> tuple[mx.array, mx.array]:
        keys, values = super()._arrays()
        if not keys.shape[2]:
            return keys, values
        return parted(keys, self.packs), parted(values, self.packs)

    def attend(self, call: AttentionCall) -> mx.array:
        """Attention of (B, Hq, L, D) with all tokens held, in the queries' type.

        Raises:
            CacheStateError: when the cache moved on since the view was made.
        """
        if self.packs == 1:
            return super().attend(call)
        call.check(self.rows)
        if call.length == 0:
            return self.no_rows(call.queries)
        _, n_kv, _, v_dim = self._known_shape()
        keys, values = self.attended(call.mask, call.length)
        out: Any = attend(
            spread(call.queries, n_kv, self.packs), keys, values, n_kv=n_kv // self.packs,
            v_dim=self.packs * v_dim, scale=call.scale, mask=call.mask, sinks=call.sinks,
            use_kernels=self.use_kernels,
        )  # fmt: skip
        return self._settled(gathered(out, n_kv, self.packs))
