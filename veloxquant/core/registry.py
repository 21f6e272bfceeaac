"""Names of quantizers, codebook strategies and preconditioners, and the classes they stand for.

A class registers itself when its module is imported; the factories import what they offer.
"""

from collections.abc import Callable
from threading import Lock
from typing import ClassVar, TypeVar

T = TypeVar("T", bound=type)


class _Registry:
    """Name to class; every subclass has names of its own."""

    kind: ClassVar[str] = "class"
    _classes: ClassVar[dict[str, type]]
    _lock: ClassVar[Lock]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._classes, cls._lock = {}, Lock()

    @classmethod
    def register(cls, name: str) -> Callable[[T], T]:
        """Decorate a class to register it under `name`; the class is returned unchanged.

        Raises:
            ValueError: when another class has that name. The same class of a module that was
                loaded again takes its place.
        """

        def add(made: T) -> T:
            with cls._lock:
                known = cls._classes.get(name)
                if known is not None and known.__qualname__ != made.__qualname__:
                    raise ValueError(
                        f"{cls.kind} {name!r} is {known.__qualname__} already; "
                        f"register {made.__qualname__} under another name"
                    )
                cls._classes[name] = made
            return made

        return add

    @classmethod
    def get(cls, name: str) -> type:
        """The class registered under `name`.

        Raises:
            KeyError: when there is none, naming those that are known.
        """
        with cls._lock:
            found = cls._classes.get(name)
            known = ", ".join(sorted(cls._classes))
        if found is None:
            raise KeyError(f"no {cls.kind} is registered as {name!r}; known: {known or 'none'}")
        return found

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All registered names, sorted."""
        with cls._lock:
            return tuple(sorted(cls._classes))


class QuantizerRegistry(_Registry):
    """Quantizers by name."""

    kind = "quantizer"


class CodebookRegistry(_Registry):
    """Codebook strategies by name."""

    kind = "codebook strategy"


class PreconditionerRegistry(_Registry):
    """Preconditioners by name."""

    kind = "preconditioner"
