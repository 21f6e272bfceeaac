"""Evicting caches whose heads may come to hold unequal numbers of rows, in one pool of slots."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from veloxquant.cache.attend import decode_range
from veloxquant.cache.evicting import POSITIONS, EvictingCache
from veloxquant.cache.pooled_heads import HeadRows, counts_of, pooled_attention
from veloxquant.cache.row_moves import share_rows
from veloxquant.cache.view import AttentionCall
from veloxquant.core.exceptions import CacheStateError


class PooledHeadsCache(EvictingCache):
    """A prompt is compressed once; its rows may become a pool that heads share unequally.

    `select` says so by giving (B, H·b) rows of all heads instead of (B, H, b). `head_rows` (B, H)
    then says how many slots each head has, of which the pool holds `pool_rows` a head on average;
    None while all heads hold the same rows. Rows that come later are each head's own.
    """

    equal_heads = ""
    """The setting that keeps heads equal, for messages."""
    head_rows: mx.array | None = None
    pool_rows = 0

    def take(self, keep: mx.array) -> None:
        """Keep the rows at `keep`, as the heads' own or as a pool; columns but positions end."""
        if keep.ndim == 3:
            super().take(keep)
            return
        batch, heads, _, _ = self._known_shape()
        rows = self.rows
        share_rows(self.key_rows, keep)
        share_rows(self.value_rows, keep)
        self.columns = {POSITIONS: mx.contiguous((keep % rows).reshape(batch, heads, -1))}
        self.head_rows = counts_of(keep, heads, rows).astype(mx.int32)
        self.pool_rows = keep.shape[-1] // heads

    # ---- attention ----------------------------------------------------------------------

    def attend(self, call: AttentionCall) -> mx.array:
        """Attention of every query with its head's slots and later rows.

        Raises:
            CacheStateError: when the cache moved on since the view was made, or the mask is an
                array, which cannot tell unequal heads apart.
        """
        if self.head_rows is None or call.length == 0:
            return super().attend(call)
        call.check(self.rows)
        if isinstance(call.mask, mx.array):
            raise CacheStateError(
                f"a mask array {call.mask.shape} came to heads that hold unequal numbers of rows, "
                f"which it cannot tell apart; pass None or 'causal'"
            )
        rows = (decode_range(side, 0, self.rows, self._dtype) for side in self.runs())
        sides = [HeadRows(x[:, :, : self.pool_rows], x[:, :, self.pool_rows :]) for x in rows]
        out = pooled_attention(
            call.queries, sides[0], sides[1], self.head_rows, call.scale, call.sinks
        )
        return self._settled(out)

    def _arrays(self) -> tuple[mx.array, mx.array]:
        if self.head_rows is not None:
            raise CacheStateError(
                f"heads of this cache hold unequal numbers of rows, which two arrays cannot say; "
                f"attach the attention hook, or set {self.equal_heads}"
            )
        return super()._arrays()

    # ---- state --------------------------------------------------------------------------

    def extra_arrays(self) -> Iterator[mx.array]:
        """The heads' counts too."""
        yield from super().extra_arrays()
        if self.head_rows is not None:
            yield self.head_rows

    def extra_state(self) -> list[Any]:
        """The heads' counts too."""
        return [*super().extra_state(), self.head_rows]

    def restore_extra(self, saved: list[Any]) -> None:
        """Take back what `extra_state` gave.

        Raises:
            CacheStateError: when counts do not fit the pool.
        """
        super().restore_extra(saved[:-1])
        counts, slots = saved[-1], 0
        if counts is not None:
            batch, heads, _, _ = self._known_shape()
            fits = counts.shape == (batch, heads) and counts.dtype == mx.int32
            fits = fits and (counts >= 0).all().item()
            slots = self.rows - self.since_eviction
            if not fits or slots < 1 or (counts.sum(axis=-1) != heads * slots).any().item():
                raise CacheStateError(
                    f"counts of heads in this state do not make {slots} rows a head"
                )
        self.head_rows, self.pool_rows = counts, slots
