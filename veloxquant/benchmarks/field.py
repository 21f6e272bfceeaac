"""Many caches under one model: the same tokens, a row of the batch for each.

All contenders share every matrix product of the model, and only attention goes row by row. That
makes a comparison several times cheaper than one run each, and pairs it to the last bit: no row
knows of the others.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from veloxquant.cache.view import AttentionCall, CacheView


class FieldLayer:
    """One layer's caches of all contenders, of any kind, in place of a batch cache."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = list(rows)
        self._fetched: list[tuple[Any, Any]] = []

    @property
    def offset(self) -> int:
        """Absolute position of the next token, the same for all rows."""
        return self.rows[0].offset

    def make_mask(self, N: int, **_: Any) -> str | None:
        """None or "causal": every row knows its own length."""
        return None if N == 1 else "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[CacheView, CacheView]:
        """Give each row its tokens (1, H, L, D); views that come back here."""
        self._fetched = [
            row.update_and_fetch(keys[i : i + 1], values[i : i + 1])
            for i, row in enumerate(self.rows)
        ]
        return (
            CacheView(self, keys.shape, keys.dtype, is_key=True, own=True),
            CacheView(self, values.shape, values.dtype, is_key=False, own=True),
        )

    def attend(self, call: AttentionCall) -> mx.array:
        """Attention of each row (1, Hq, L, D) as mlx-lm would compute it with that cache."""
        from mlx_lm.models import base

        attention: Any = base.scaled_dot_product_attention
        return mx.concatenate(
            [
                attention(
                    call.queries[i : i + 1],
                    keys,
                    values,
                    cache=row,
                    scale=call.scale,
                    mask=call.mask,
                    sinks=call.sinks,
                )
                for i, (row, (keys, values)) in enumerate(
                    zip(self.rows, self._fetched, strict=True)
                )
            ],
            axis=0,
        )

    def states(self) -> list[Any]:
        """What must be evaluated after a chunk of a prompt."""
        self._fetched = []
        return [row.state for row in self.rows]
