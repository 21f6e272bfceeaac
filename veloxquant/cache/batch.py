"""`RowBatch`: any of our caches in mlx-lm's continuous batching, one row a sequence.

mlx-lm pads prompts of unequal length on the right and says how many tokens of each row are real;
only those are appended, so no padding is ever stored and no packed row is ever shifted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NoReturn

import mlx.core as mx

from veloxquant.cache.view import AttentionCall, CacheView
from veloxquant.core.exceptions import CacheStateError


class RowBatch:
    """A batch cache over single-sequence caches.

    Rows are any objects with mlx-lm's single-cache protocol whose `update_and_fetch` returns views
    or arrays. `deepcopy` shares the rows: mlx-lm copies a batch only to filter both copies to
    disjoint rows.
    """

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = list(rows)
        # Models with attention of their own may score in five axes and take the mask so.
        self._mask_axes = max((getattr(row, "mask_axes", 4) for row in self.rows), default=4)
        self._remaining: list[int] | None = None
        self._step: list[tuple[int, CacheView | None]] = []
        self._counts: list[int] = []

    @property
    def counts(self) -> list[int]:
        """Real tokens of each row in the newest call; the others are padding."""
        return self._counts

    # ---- mlx-lm's batch protocol --------------------------------------------------------

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.rows)

    def __bool__(self) -> bool:
        """Always true: mlx-lm takes a false cache for a missing one."""
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> RowBatch:
        """A batch of the same row objects."""
        out = RowBatch(self.rows)
        out._remaining = None if self._remaining is None else list(self._remaining)
        return out

    @property
    def offset(self) -> mx.array:
        """Absolute position of the next token of each row, (B,) int32."""
        return mx.array([row.offset for row in self.rows], dtype=mx.int32)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Note how many tokens of each row of the coming prompt are real.

        Raises:
            CacheStateError: for left padding, which would have to be stored.
        """
        if left_padding is not None and any(left_padding):
            raise CacheStateError("left-padded prompts cannot be cached; pad them on the right")
        if lengths is not None:
            self._remaining = [int(n) for n in lengths]
        elif right_padding is None:
            self._remaining = None

    def finalize(self) -> None:
        """The padded prompt is complete."""
        self._remaining = None

    def _take_lengths(self, length: int) -> list[int]:
        if self._remaining is None:
            return [length] * len(self.rows)
        now = [min(n, length) for n in self._remaining]
        self._remaining = [n - m for n, m in zip(self._remaining, now, strict=True)]
        return now

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append the real tokens of (B, H, L, D) to their rows."""
        batch, heads, length, k_dim = keys.shape
        if batch != len(self.rows):
            raise CacheStateError(f"{batch} rows were fed to a batch of {len(self.rows)}")
        self._step = []
        self._sizes = (heads, length, k_dim, values.shape[-1])
        self._dtype = keys.dtype
        self._counts = self._take_lengths(length)
        step = []
        for i, n in enumerate(self._counts):
            row_keys = keys[i : i + 1, :, :n] if n != length or batch > 1 else keys
            row_values = values[i : i + 1, :, :n] if n != length or batch > 1 else values
            step.append((n, *self.rows[i].update_and_fetch(row_keys, row_values)))
        if not self._returns_views():
            return self._padded_arrays(step)
        # Arrays of a row are slices of its buffers: held here they would count twice.
        self._step = [(n, keys if isinstance(keys, CacheView) else None) for n, keys, _ in step]
        return self._views(own=True)

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the last `update_and_fetch` returned."""
        if self._returns_views():
            return self._views(own=False)
        # Decoded arrays are never kept; they are made again for a layer that shares them.
        fetched = zip(self._counts, (row.keys_and_values() for row in self.rows), strict=True)
        return self._padded_arrays([(n, *pair) for n, pair in fetched])

    def _views(self, *, own: bool) -> tuple[CacheView, CacheView]:
        heads, _, k_dim, v_dim = self._sizes
        total = max(row.size() for row in self.rows)
        shape = (len(self.rows), heads, total)
        return (
            CacheView(self, (*shape, k_dim), self._dtype, is_key=True, own=own),
            CacheView(self, (*shape, v_dim), self._dtype, is_key=False, own=own),
        )

    def _returns_views(self) -> bool:
        return all(row.batch_views for row in self.rows)

    def _padded_arrays(self, step: list[tuple[int, Any, Any]]) -> tuple[mx.array, mx.array]:
        """Rows as arrays, the newest token of all rows in the last column but for its padding."""
        length = self._sizes[1]
        width = max(keys.shape[2] + length - n for n, keys, _ in step)
        out: tuple[list[mx.array], list[mx.array]] = ([], [])
        for n, keys, values in step:
            tail = length - n
            room = [(0, 0), (0, 0), (width - keys.shape[2] - tail, tail), (0, 0)]
            out[0].append(mx.pad(keys, room))
            out[1].append(mx.pad(values, room))
        return mx.concatenate(out[0], axis=0), mx.concatenate(out[1], axis=0)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> mx.array | str | None:
        """None or "causal" for views; else a bool mask, True where a token may be seen.

        It is (B, 1, N, T) or, for models that ask for it, (B, 1, 1, N, T). Each row's tokens end
        in column T - 1 but for the padding of its prompt; what is before them is hidden.
        """
        if self._returns_views() and not return_array and window_size is None:
            return None if N == 1 else "causal"
        real = [N] * len(self.rows) if self._remaining is None else self._remaining
        for row, n in zip(self.rows, real, strict=True):
            row.make_ready(min(n, N))  # sizes must be those that the coming update starts from
        width = N + max(row.size() for row in self.rows)
        columns = mx.arange(width)
        queries = mx.arange(width - N, width)[:, None]
        mask = queries >= columns[None]
        if window_size is not None:
            mask = mask & (queries < columns[None] + window_size)
        first = mx.array([width - N - row.size() for row in self.rows])
        lead = (len(self.rows), *(1,) * (self._mask_axes - 3))
        return mask & (columns >= first.reshape(*lead, 1, 1))

    # ---- attention ----------------------------------------------------------------------

    def attend(self, call: AttentionCall) -> mx.array:
        """Attention row by row over (B, Hq, L, D); padded queries give zeros.

        Raises:
            CacheStateError: when an array mask covers other tokens than are held, or the batch
                changed since the view was made.
        """
        if call.view.shape[0] != len(self._step):
            raise CacheStateError("the batch changed since this view was made")
        queries, mask, length = call.queries, call.mask, call.length
        out = []
        for i, (n, row_view) in enumerate(self._step):
            if n == 0:
                shape = (1, queries.shape[1], length, self._sizes[3])
                out.append(mx.zeros(shape, dtype=queries.dtype))
                continue
            q = queries[i : i + 1, :, :n]
            if isinstance(mask, mx.array):
                row_mask = self._row_mask(mask, i, n, self.rows[i].size())
            else:
                row_mask = None if n == 1 else "causal"
            if row_view is not None:
                row = row_view.cache.attend(call._replace(queries=q, view=row_view, mask=row_mask))
            else:
                keys, values = self.rows[i].keys_and_values()
                row = mx.fast.scaled_dot_product_attention(
                    q, keys, values, scale=call.scale, mask=row_mask, sinks=call.sinks
                )
            if n < length:
                row = mx.pad(row, [(0, 0), (0, 0), (0, length - n), (0, 0)])
            out.append(row)
        return out[0] if len(out) == 1 else mx.concatenate(out, axis=0)

    def _row_mask(self, mask: mx.array, i: int, n: int, held: int) -> mx.array:
        """The part of a mask (B or 1, heads or 1, L, T) that concerns the tokens of row `i`."""
        length = self._sizes[1]
        width, real = mask.shape[-1], [m for m, _ in self._step]
        wanted = max(r.size() + length - m for r, m in zip(self.rows, real, strict=True))
        if width != wanted:
            raise CacheStateError(
                f"the mask covers {width} tokens, the batch holds {wanted}; "
                f"methods that give up tokens cannot serve a model with array masks"
            )
        first = width - length - (held - n)
        mine = mask[i : i + 1] if mask.shape[0] == len(self.rows) else mask
        return mine[..., :n, first : first + held]

    # ---- rows ---------------------------------------------------------------------------

    def filter(self, batch_indices: Any) -> None:
        """Keep just these rows, in this order."""
        keep = mx.array(batch_indices, dtype=mx.int32).reshape(-1).tolist()
        self.rows = [self.rows[int(i)] for i in keep]  # type: ignore[arg-type]
        self._step = []

    def extend(self, other: RowBatch) -> None:
        """Add the rows of another batch."""
        self.rows.extend(other.rows)
        self._step = []

    def extract(self, idx: int) -> Any:
        """One row as a single cache of its own; buffers are shared until one of both writes."""
        return copy.deepcopy(self.rows[idx])

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> RowBatch:
        """A batch of single caches."""
        return cls(caches)

    # ---- state --------------------------------------------------------------------------

    @property
    def state(self) -> list[Any]:
        """States of the rows."""
        self._step = []
        return [row.state for row in self.rows]

    @state.setter
    def state(self, saved: list[Any]) -> None:
        """Give each row its state."""
        for row, row_state in zip(self.rows, saved, strict=True):
            row.state = row_state

    def compact_state(self) -> NoReturn:
        """Refused: a file holds one sequence.

        Raises:
            CacheStateError: always, with what to save instead.
        """
        raise CacheStateError(
            "a batch is saved row by row: save_caches(path, [cache.extract(row) for cache in "
            "caches], config)"
        )

    @property
    def nbytes(self) -> int:
        """Bytes held by all rows."""
        return sum(row.nbytes for row in self.rows)

    def size(self) -> int:
        """Tokens of the longest row."""
        return max((row.size() for row in self.rows), default=0)

    def empty(self) -> bool:
        """Whether no row holds anything."""
        return all(row.empty() for row in self.rows)

    def is_trimmable(self) -> bool:
        """Whether every row can rewind."""
        return all(row.is_trimmable() for row in self.rows)

    def trim(self, n: int) -> int:
        """Rewind every row by what all of them can rewind; none when one of them cannot."""
        if not self.is_trimmable():
            return 0
        n = min([n, *(row.offset for row in self.rows)])
        return min((row.trim(n) for row in self.rows), default=0)
