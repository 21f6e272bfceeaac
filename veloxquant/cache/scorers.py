"""Scores of stored tokens: how much the model's queries, or the keys' geometry, want each one."""

import copy
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Protocol

import mlx.core as mx

from veloxquant.cache.selection import average_pool


class Scorer(Protocol):
    """Accumulates what it needs from queries and gives one score per stored row."""

    needs: ClassVar[Literal["none", "last", "window", "all"]]

    def observe(self, queries: mx.array, scale: float) -> None:
        """Look at the queries (B, Hq, L, D) of the newest rows."""
        ...

    def score(self, keys: mx.array) -> mx.array:
        """(B, H, n, D) stored keys to (B, H, n) fp32, larger is better."""
        ...

    def arrays(self) -> Iterator[mx.array]:
        """Arrays held."""
        ...


class WindowAttention:
    """Attention of the last `window` queries: summed, pooled along the sequence, mean per group.

    Source: SnapKV (arXiv 2404.14469), sections 3 and 4; the group mean is that of kvpress, since
    one selection a KV head keeps grouped-query memory.
    """

    needs: ClassVar[Literal["window"]] = "window"

    def __init__(self, window: int, kernel: int, dtype: mx.Dtype | None = None) -> None:
        self.window = window
        self.kernel = kernel
        self.dtype = dtype
        self.queries: mx.array | None = None
        self.scale = 1.0

    def observe(self, queries: mx.array, scale: float) -> None:
        """Keep the last `window` queries."""
        ring = queries[:, :, -self.window :]
        if self.queries is not None and ring.shape[2] < self.window:
            older = self.queries[:, :, -(self.window - ring.shape[2]) :]
            ring = mx.concatenate([older, ring], axis=2)
        # A slice would keep all queries of the chunk alive.
        self.queries = mx.contiguous(ring)
        self.scale = scale

    def score(self, keys: mx.array) -> mx.array:
        """Pooled attention mass of rows before the window; rows inside it score 0, being forced."""
        assert self.queries is not None
        batch, n_q, window, dim = self.queries.shape
        heads, n = keys.shape[1], keys.shape[2]
        work = self.dtype or mx.float32
        q = self.queries.reshape(batch, heads, -1, dim).astype(work)
        logits = (q @ keys.astype(work).swapaxes(-1, -2)).astype(mx.float32) * self.scale
        logits = logits.reshape(batch, heads, n_q // heads, window, n)
        visible = mx.arange(n - window, n)[:, None] >= mx.arange(n)[None]
        logits = mx.where(visible, logits, -mx.inf)
        mass = mx.softmax(logits, axis=-1, precise=True).sum(axis=-2).mean(axis=2)
        before = average_pool(mass[..., : n - window], self.kernel)
        return mx.pad(before, [(0, 0), (0, 0), (0, window)])

    def forget(self) -> None:
        """Drop the queries; the next prompt brings new ones."""
        self.queries = None

    def arrays(self) -> Iterator[mx.array]:
        """The ring of queries."""
        if self.queries is not None:
            yield self.queries

    def __deepcopy__(self, memo: dict[int, Any]) -> "WindowAttention":
        """An independent copy."""
        twin = WindowAttention(self.window, self.kernel, self.dtype)
        twin.queries, twin.scale = copy.deepcopy(self.queries, memo), self.scale
        return twin

    def saved(self) -> list[Any]:
        """The ring and its scale."""
        return [self.queries, self.scale]

    def restore(self, saved: list[Any]) -> None:
        """Take back what `saved` gave."""
        self.queries, self.scale = saved


def key_difference(keys: mx.array) -> mx.array:
    """Score without queries: minus the cosine to the mean key direction, (B, H, n) fp32.

    Source: KeyDiff (arXiv 2504.15364); the fallback when the model's queries cannot be seen.
    """
    rows = keys.astype(mx.float32)
    unit = rows / mx.maximum(mx.linalg.norm(rows, axis=-1, keepdims=True), 1e-6)
    mean = unit.mean(axis=2, keepdims=True)
    return -(unit * mean).sum(axis=-1)
