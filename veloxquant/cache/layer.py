"""The base of every cache of one layer: mlx-lm's protocol over stores of ours.

When a token is written: `update_and_fetch` commits the block before, keeps the new one as
`pending` at full precision and returns views (or arrays); attention reads stores and pending; the
next call, or anything that looks at the state, commits. So fresh tokens are attended exactly, the
buffers are free to be written in place, and layers that share keys may attend again.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, NoReturn

import mlx.core as mx

from veloxquant.cache.attend import Fresh, Mask, Run, attend, decode_range
from veloxquant.cache.batch import RowBatch
from veloxquant.cache.by_config import ByConfig
from veloxquant.cache.fitting import (
    STATE_VERSION,
    Version,
    fitting_state,
    refuse_state,
    shape_of_rows,
)
from veloxquant.cache.store import Store
from veloxquant.cache.view import AttentionCall, CacheView
from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers.sizes import LayerShape

Rows = tuple[mx.array, mx.array]


class LayerCache(metaclass=ByConfig):
    """Keys and values of one layer for B independent sequences of equal length.

    Subclasses say which stores hold the tokens (`stores`) and how committed tokens enter them
    (`write`). `returns` is "arrays" as documented; `for_model` switches to "views" once the
    attention hook is attached.
    """

    method = ""
    fidelity: Literal["exact", "proxy"] = "exact"
    use_kernels: bool | None = None
    """`use_metal_kernels` of the configuration: False keeps attention to array operations."""
    writes_through = False
    """Rows enter the stores at once and attention reads them there: for exact stores only, whose
    rows attention reads in place; what `commit` would do is done by `settle` alone."""

    constants: ClassVar[frozenset[str]] = frozenset()
    """Attributes that copies share."""
    packs = 1
    """KV heads that stores hold side by side as one."""

    def __init__(self) -> None:
        self.offset = 0
        self.pending: Rows | None = None
        self.returns: Literal["arrays", "views"] = "arrays"
        self.mask_axes = 4
        self._unevaluated: list[mx.array] = []
        self._shape: tuple[int, int, int, int] | None = None
        self._dtype: mx.Dtype = mx.float16

    # ---- what a method decides ----------------------------------------------------------

    @abstractmethod
    def streams(self) -> tuple[Sequence[Store], Sequence[Store]]:
        """Stores of keys and of values, oldest tokens first; empty ones may be left out."""

    @abstractmethod
    def write(self, keys: mx.array, values: mx.array) -> None:
        """Take committed tokens (B, H, n, D) into the stores."""

    @abstractmethod
    def drop(self, n: int) -> int:
        """Rewind the newest `n` committed tokens; returns how many were rewound."""

    def settle(self) -> None:
        """Evict what the last step made superfluous; called before anything new is written."""

    def observe(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> None:
        """Look at the true queries (B, Hq, L, D) of the pending tokens; scorers override.

        `sinks` (Hq,) are logits that the model adds to the denominator of its softmax.
        """

    def extra_arrays(self) -> Iterator[mx.array]:
        """Arrays held besides the stores, such as scores and positions."""
        return iter(())

    def extra_state(self) -> list[Any]:
        """What `extra_arrays` needs to be saved: arrays, numbers, text or None."""
        return []

    def restore_extra(self, saved: list[Any]) -> None:
        """Take back what `extra_state` returned."""

    # ---- mlx-lm's protocol --------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Add (B, H, L, D) and return everything to attend to, as views or as arrays."""
        self.make_ready(keys.shape[2])
        shape = shape_of_rows(self, keys, values)
        if self._shape is None:
            self._shape, self._dtype = shape, keys.dtype
        if keys.shape[2]:
            self.offset += keys.shape[2]
            if self.writes_through:
                self.write(keys, values)
                self._unevaluated = list(self.arrays())
            else:
                self.pending = (keys, values)
        if self.returns == "views":
            return self._views(own=True)
        return self._arrays()

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the last `update_and_fetch` returned, for layers that share keys."""
        return self._views(own=False) if self.returns == "views" else self._arrays()

    def _views(self, *, own: bool) -> tuple[CacheView, CacheView]:
        batch, heads, k_dim, v_dim = self._known_shape()
        rows = self.rows
        return (
            CacheView(self, (batch, heads, rows, k_dim), self._dtype, is_key=True, own=own),
            CacheView(self, (batch, heads, rows, v_dim), self._dtype, is_key=False, own=own),
        )

    def _arrays(self) -> Rows:
        keys, values = self.runs()
        if not keys:
            batch, heads, k_dim, v_dim = self._known_shape()
            return (
                mx.zeros((batch, heads, 0, k_dim), dtype=self._dtype),
                mx.zeros((batch, heads, 0, v_dim), dtype=self._dtype),
            )
        total = self.rows
        out = tuple(decode_range(side, 0, total, self._dtype) for side in (keys, values))
        return self._settled(out[0]), out[1]

    def attend(self, call: AttentionCall) -> mx.array:
        """Attention of (B, Hq, L, D) with all tokens held, in the queries' type.

        Raises:
            CacheStateError: when the cache moved on since the view was made.
        """
        call.check(self.rows)
        if call.length == 0:
            return self.no_rows(call.queries)
        keys, values = self.attended(call.mask, call.length)
        _, n_kv, _, v_dim = self._known_shape()
        out = attend(
            call.queries, keys, values, n_kv=n_kv, v_dim=v_dim,
            scale=call.scale, mask=call.mask, sinks=call.sinks, use_kernels=self.use_kernels,
        )  # fmt: skip
        if call.owner:
            self.observe(call.queries, call.scale, call.sinks)
        return self._settled(out)

    def no_rows(self, queries: mx.array) -> mx.array:
        """The output of no queries at all, which an empty append leads to."""
        return mx.zeros((*queries.shape[:3], self._known_shape()[3]), dtype=queries.dtype)

    def _settled(self, out: mx.array) -> mx.array:
        """Make `out` carry everything written since the last call.

        In decode nothing else evaluates the cache, and an unevaluated buffer drags the whole graph
        of its past along.
        """
        todo, self._unevaluated = self._unevaluated, []
        return mx.depends([out], todo)[0] if todo else out

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Mask:
        """The mask for `N` new tokens over all tokens held.

        Raises:
            CacheStateError: when an array is asked for after tokens were evicted.
        """
        if not return_array and window_size is None:
            return None if N == 1 else "causal"
        held = self.offset - self._evicted()
        if held != self.offset:
            raise CacheStateError(
                f"method {self.method!r} evicted tokens, and this model asks for an array mask; "
                f"choose a method that keeps every token"
            )
        if N == 1 and window_size is None:
            return None
        rows = mx.arange(self.offset, self.offset + N)[:, None]
        columns = mx.arange(self.offset + N)[None]
        mask = rows >= columns
        return mask if window_size is None else mask & (rows < columns + window_size)

    def _evicted(self) -> int:
        return self.offset - self.rows

    # ---- state --------------------------------------------------------------------------

    def commit(self) -> None:
        """Move the pending tokens into the stores and let the method evict."""
        if self.pending is not None:
            keys, values = self.pending
            self.pending = None
            self.write(keys, values)
            self._unevaluated = list(self.arrays())
        self.settle()

    def make_ready(self, n: int) -> None:
        """Commit, and give up what `n` new tokens displace before they are attended."""
        del n
        self.commit()

    def stores(self) -> tuple[Store, ...]:
        """All non-empty stores of keys and values."""
        keys, values = self.streams()
        return tuple(s for s in (*keys, *values) if s.length)

    def runs(self) -> tuple[list[Run], list[Run]]:
        """What attention reads, in token order: the stores, then the pending rows."""
        sides: list[list[Run]] = []
        for i, side in enumerate(self.streams()):
            runs: list[Run] = [s for s in side if s.length]
            if self.pending is not None:
                runs.append(Fresh(self.pending[i]))
            sides.append(runs)
        return sides[0], sides[1]

    def attended(self, mask: Mask, length: int) -> tuple[list[Run], list[Run]]:
        """What attention of the newest `length` tokens under `mask` reads.

        `runs`; or the same tokens in another order, alike in keys and values, where the mask hides
        none of those that change places.
        """
        del mask, length
        return self.runs()

    @property
    def batch_views(self) -> bool:
        """Whether a batch of such rows may hand out views."""
        return self.returns == "views"

    @property
    def rows(self) -> int:
        """Tokens held, the pending ones included."""
        held = sum(s.length for s in self.streams()[0])
        return held + (self.pending[0].shape[2] if self.pending is not None else 0)

    def arrays(self) -> Iterator[mx.array]:
        """Every array that this cache keeps alive."""
        for side in self.streams():
            for store in side:
                yield from store.arrays()
        yield from self.extra_arrays()
        if self.pending is not None:
            yield from self.pending

    @property
    def nbytes(self) -> int:
        """Bytes held: buffers with their growth steps, pending rows, scores and positions."""
        return sum(a.nbytes for a in self.arrays())

    def size(self) -> int:
        """Tokens held."""
        return self.rows

    def empty(self) -> bool:
        """Whether no token was ever held."""
        return self.offset == 0

    def __bool__(self) -> bool:
        """Always true: mlx-lm takes a false cache for a missing one."""
        return True

    def is_trimmable(self) -> bool:
        """Whether `trim` can rewind."""
        return True

    def trim(self, n: int) -> int:
        """Rewind the newest `n` tokens; returns how many were rewound."""
        self.commit()
        n = self.drop(max(0, min(n, self.offset)))
        self.offset -= n
        if n:
            # A lazy cut would keep the long buffers alive until the next attention.
            mx.eval(list(self.arrays()))
            self._unevaluated = []
        return n

    def layout(self) -> list[Store]:
        """Every store in a fixed order, for saving."""
        keys, values = self.streams()
        return [*keys, *values]

    @staticmethod
    def merge(caches: Sequence[LayerCache]) -> RowBatch:
        """A batch of these sequences for mlx-lm's continuous batching."""
        return RowBatch(caches)

    @property
    def state(self) -> list[Any]:
        """Packed arrays and counters; committing first. A tree of arrays, numbers and text."""
        self.commit()
        self._unevaluated = []
        return [Version(), *self._state([s.live for s in self.layout()])[1:]]

    def compact_state(self) -> list[Any]:
        """As `state`, with buffers cut to the tokens held: what goes into a file."""
        self.commit()
        return self._state([s.compact() for s in self.layout()])

    def _state(self, stores: list[Any]) -> list[Any]:
        shape = list(self._shape or ())
        dtype = str(self._dtype).removeprefix("mlx.core.")
        return [STATE_VERSION, self.method, self.offset, dtype, shape, stores, self.extra_state()]

    @state.setter
    def state(self, saved: list[Any]) -> None:
        """Take over a state of the same method and layout.

        Raises:
            CacheStateError: when it was written by another version, method or layout.
        """
        fits = fitting_state(self, saved)
        self.pending = None
        self.offset, self._dtype, self._shape = fits.offset, fits.dtype, fits.shape
        for store, held in zip(self.layout(), fits.stores, strict=True):
            store.adopt(held)
        self.restore_extra(fits.extra)
        self._unevaluated = list(self.arrays())

    @classmethod
    def from_state(cls, state: Any, meta_state: Any = None) -> NoReturn:
        """Refused: a state is given to a cache that was built with the same settings.

        Raises:
            CacheStateError: always, with what to do instead.
        """
        del state, meta_state
        refuse_state(cls)

    def fits_plan(self, offset: int, held: list[int]) -> bool:
        """Whether stores of these lengths, in the order of `layout`, may hold `offset` tokens."""
        return max(held, default=0) <= offset

    @property
    def meta_state(self) -> str:
        """Empty: counters are part of `state`."""
        return ""

    @meta_state.setter
    def meta_state(self, _: Any) -> None:
        """Nothing to restore."""

    def _known_shape(self) -> tuple[int, int, int, int]:
        if self._shape is None:
            raise CacheStateError("the cache is empty; it learns its shape from the first tokens")
        return self._shape

    def shape(self) -> LayerShape | None:
        """Attention shape without query heads, once known; for estimates and reports."""
        if self._shape is None:
            return None
        _, heads, k_dim, v_dim = self._shape
        return LayerShape(heads, heads, k_dim, v_dim, self._dtype.size)

    def copy(self) -> LayerCache:
        """An independent copy; buffers are shared until one of both writes."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCache:
        """An independent copy; element types and position encodings are shared constants."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            constant = isinstance(value, mx.Dtype) or name in self.constants
            setattr(twin, name, value if constant else copy.deepcopy(value, memo))
        return twin

    # ---- counters of the documents ------------------------------------------------------

    def full_bytes(self) -> int:
        """Bytes that keys and values of all tokens seen would take uncompressed, in 16 bits."""
        if self._shape is None:
            return 0
        batch, heads, k_dim, v_dim = self._shape
        return 2 * batch * heads * self.offset * (k_dim + v_dim)
