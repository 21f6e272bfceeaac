"""A configuration that is given a field it does not have says so, and which ones are near."""

import dataclasses
import difflib
import functools
from typing import Any, TypeVar

from veloxquant.core.exceptions import QuantizerConfigError

_Class = TypeVar("_Class", bound=type)
_CUTOFF = 0.5


def unknown_field(owner: str, name: str, known: list[str]) -> QuantizerConfigError:
    """The error for a field `name` that the class `owner` does not have."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=_CUTOFF)
    hint = f"did you mean {' or '.join(near)}?" if near else f"help({owner}) lists them"
    return QuantizerConfigError(f"{owner} has no field {name!r}; {hint}")


def naming_unknown_fields(cls: _Class) -> _Class:
    """A dataclass whose constructor names an argument it does not know, and the nearest fields.

    The bare constructor raises a `TypeError` without them.
    """
    made = cls.__init__
    known = [field.name for field in dataclasses.fields(cls)]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                raise unknown_field(cls.__name__, name, known)
        made(self, *args, **given)

    cls.__init__ = init
    return cls
