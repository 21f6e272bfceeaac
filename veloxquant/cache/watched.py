"""Modules that answer to a subclass of their own class for a while.

Only `type(module)` changes: parameters, names and children stay as they are, and other models of
the same class know nothing of it.
"""

import weakref
from collections.abc import Sequence
from typing import Any

Changed = tuple[weakref.ref[Any], type]


def calling(base: type, call: Any) -> type:
    """A subclass of `base` under its name whose instances are called by `call(self, ...)`."""
    names = {"__call__": call, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), names)


def become(module: Any, cls: type) -> Changed:
    """Give a module another class; returns what `put_back` undoes it with."""
    before = type(module)
    module.__class__ = cls
    return weakref.ref(module), before


def put_back(changed: Sequence[Changed]) -> None:
    """Give modules the classes that they had, those that still live; the last one changed first."""
    for ref, before in reversed(changed):
        if (module := ref()) is not None:
            module.__class__ = before
