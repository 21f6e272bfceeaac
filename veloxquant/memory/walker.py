"""Find every array that an object holds, whatever the object says about itself."""

import types
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_LEAVES = (
    str, bytes, int, float, complex, type(None), type, mx.Dtype, nn.Module, types.ModuleType,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType,
)  # fmt: skip


def arrays_in(roots: Iterable[Any]) -> list[mx.array]:
    """Arrays reachable from `roots`, each once.

    Follows attributes, slots and containers; stops at models, modules and functions, whose arrays
    are weights and not cache.
    """
    seen: set[int] = set()
    found: list[mx.array] = []
    kept: list[Any] = []  # so that no id is used twice while we walk
    stack = list(roots)
    while stack:
        item = stack.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        kept.append(item)
        if isinstance(item, mx.array):
            found.append(item)
        else:
            stack.extend(_children(item))
    return found


def _children(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    out = list(vars(item).values()) if hasattr(item, "__dict__") else []
    for cls in type(item).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(item, name):
                out.append(getattr(item, name))
    return out


def bytes_of(arrays: Iterable[mx.array]) -> int:
    """Sum of the bytes they hold; an axis that is only repeated (stride 0) counts once."""
    return sum(_held(array) for array in arrays)


def _held(array: mx.array) -> int:
    try:
        strides = memoryview(array).strides  # type: ignore[arg-type]
    except (BufferError, ValueError, TypeError):
        return array.nbytes  # a type that Python's buffers do not know
    size = array.itemsize
    for length, stride in zip(array.shape, strides or (), strict=False):
        size *= length if stride else min(length, 1)
    return size
