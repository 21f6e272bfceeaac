"""Whether rows and saved states fit a cache: everything is checked before anything is changed.

Compiled kernels read buffers by address, so a state from a file is believed only after its
counters, shapes and types are those that the codec would have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import mlx.core as mx

from veloxquant.cache.store import Store
from veloxquant.core.exceptions import CacheStateError

STATE_VERSION = 1
OWN_FILES = (
    "caches of veloxquant are kept with veloxquant.cache.persist: save_caches(path, caches, "
    "config) and load_caches(path, plan, config)"
)
ROW_TYPES = ("float16", "bfloat16", "float32")
RowShape = tuple[int, int, int, int]


class Version:
    """The version of a live state.

    It is no number, so that mlx-lm's `save_prompt_cache` refuses to write it, with `OWN_FILES` in
    its message: its loader finds mlx-lm's own classes only, and the conversation would be lost.
    """

    def __eq__(self, other: object) -> bool:
        """Whether a state of that version is read here."""
        return isinstance(other, Version) or other == STATE_VERSION

    def __hash__(self) -> int:
        """As the number."""
        return hash(STATE_VERSION)

    def __repr__(self) -> str:
        """What to do instead of saving it."""
        return OWN_FILES


def refuse_state(kind: type) -> NoReturn:
    """Say what to do with a state that nobody built a cache for.

    Raises:
        CacheStateError: always.
    """
    raise CacheStateError(
        f"a state does not tell the settings of its {kind.__name__}; build the cache and assign "
        f"`cache.state = state`; {OWN_FILES}"
    )


class Fitted(Protocol):
    """A cache of one layer, as far as fitting goes."""

    _shape: RowShape | None
    packs: int
    method: str

    def streams(self) -> tuple[Sequence[Store], Sequence[Store]]:
        """Stores of keys and of values."""
        ...

    def layout(self) -> list[Store]:
        """Every store in saving order."""
        ...

    def fits_plan(self, offset: int, held: list[int]) -> bool:
        """Whether stores of these lengths may hold `offset` tokens."""
        ...


class SavedState(NamedTuple):
    """What a cache takes over from a state that fits it."""

    offset: int
    dtype: mx.Dtype
    shape: RowShape | None
    stores: list[Any]
    extra: list[Any]


def _head_sizes(cache: Fitted) -> tuple[int, int]:
    keys, values = cache.streams()
    return keys[0].codec.dim // cache.packs, values[0].codec.dim // cache.packs


def shape_of_rows(cache: Fitted, keys: mx.array, values: mx.array) -> RowShape:
    """(B, n_kv_heads, k_dim, v_dim) of new rows, once it is sure that they belong here.

    Raises:
        ValueError: when keys and values differ, or do not fit the head sizes or the rows held.
    """
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"keys {keys.shape} and values {values.shape} do not belong together; give "
            f"(B, n_kv_heads, L, head_dim) arrays that differ in the last size only"
        )
    batch, heads, _, k_dim = keys.shape
    shape = (batch, heads, k_dim, values.shape[-1])
    if cache._shape is None:
        if shape[2:] != _head_sizes(cache):
            raise ValueError(
                f"head sizes {shape[2:]}; this cache was made for {_head_sizes(cache)}"
            )
    elif shape != cache._shape:
        raise ValueError(
            f"new rows (B, n_kv_heads, k_dim, v_dim) = {shape} do not fit the ones held, "
            f"{cache._shape}; a cache serves one set of sequences"
        )
    return shape


def check_queries(queries: mx.array, shape: RowShape, dtype: mx.Dtype, most: int) -> None:
    """Make sure that saved queries may be those of at most `most` tokens of such rows.

    Raises:
        CacheStateError: naming what does not fit.
    """
    batch, heads, dim, _ = shape
    sizes = tuple(queries.shape)
    fits = len(sizes) == 4 and (sizes[0], sizes[3]) == (batch, dim) and sizes[1] % heads == 0
    if not fits or not 0 < sizes[2] <= most or queries.dtype != dtype:
        raise CacheStateError(
            f"saved queries are {queries.dtype} of {sizes}; they should be {dtype} of {batch} "
            f"sequences, a multiple of {heads} heads, at most {most} tokens and {dim} channels"
        )


def fitting_state(cache: Fitted, saved: Any) -> SavedState:
    """The parts of a state, once it is sure that this cache may take it over.

    Raises:
        CacheStateError: when another version, method or layout wrote it, or a part does not fit.
    """
    try:
        version, method, offset, dtype, shape, stores, extra = saved
    except (TypeError, ValueError) as error:
        raise CacheStateError("this is not the state of a cache of ours") from error
    if version != STATE_VERSION:
        raise CacheStateError(f"state of format {version}; this version reads {STATE_VERSION}")
    if method != cache.method:
        raise CacheStateError(f"state of method {method!r} given to a cache of {cache.method!r}")
    layout = cache.layout()
    if len(layout) != len(stores):
        raise CacheStateError(f"state has {len(stores)} stores, this cache {len(layout)}")
    _check_parts(cache, offset, dtype, shape, stores)
    return SavedState(int(offset), getattr(mx, dtype), tuple(shape) or None, stores, extra)


def _check_parts(cache: Fitted, offset: Any, dtype: Any, shape: Any, stores: list[Any]) -> None:
    if dtype not in ROW_TYPES or type(offset) is not int or offset < 0:
        raise CacheStateError(f"state with type {dtype!r} and offset {offset!r}")
    if len(shape) not in (0, 4) or not all(type(n) is int and n > 0 for n in shape):
        raise CacheStateError(f"state of shape {shape!r}")
    layout = cache.layout()
    keys, values = cache.streams()
    rows = {id(store) for store in (*keys, *values)}
    held = [0] * len(layout)
    if shape:
        batch, heads, *sizes = shape
        if tuple(sizes) != _head_sizes(cache):
            raise CacheStateError(
                f"state of head sizes {sizes}; this cache was made for {_head_sizes(cache)}"
            )
        try:
            held = [
                store.check(
                    one,
                    batch,
                    heads // cache.packs if id(store) in rows else heads,
                    getattr(mx, dtype) if id(store) in rows else mx.int32,
                )
                for store, one in zip(layout, stores, strict=True)
            ]
        except (TypeError, ValueError, AttributeError) as error:
            raise CacheStateError(f"a store of the state is damaged: {error}") from error
    count = dict(zip(map(id, layout), held, strict=True))
    n_keys, n_values = (sum(count[id(store)] for store in side) for side in (keys, values))
    if n_keys != n_values or n_keys > offset or not cache.fits_plan(offset, held):
        raise CacheStateError(f"stores of {held} tokens do not make up {offset} tokens")
