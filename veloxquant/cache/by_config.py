"""Caches made as the documents make them: from a configuration, `H2OKVCache(config)`.

Methods build the cache of a layer from its shape and its place in a model (`build_layer`). By hand
there is the configuration, which names the head size, and for layers that share something a
coordinator and a place under it. `by_hand` of a class says what those stand for; the rest is the
same for all: the settings are checked, and what every method takes alike is applied.

A subclass of such a class is made like its parent: what builds the parent makes it instead. An
`__init__` of its own gets what the parent's gets, whatever that is, and hands it on.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from veloxquant.cache.context import LayerContext
from veloxquant.cache.table import TABLE
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import is_whole
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.sizes import LayerShape

if TYPE_CHECKING:
    from collections.abc import Mapping


_PLACES = ("layer_id", "group_id", "member_idx", "n_members", "n_readers")
_instead: ContextVar[tuple[type, Any] | None] = ContextVar("instead", default=None)
"""A class of a method and the subclass that is made by hand in its place."""


class ByConfig(ABCMeta):
    """Class of the caches of a layer: a call that names no shape is one by hand."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """A cache; by hand one that takes its head size from `config.head_dim`.

        Raises:
            QuantizerConfigError: by hand, for the configuration of another method or a setting out
                of range.
        """
        if not _is_by_hand(args, kwargs):
            meant = _instead.get()
            made = meant[1] if meant is not None and meant[0] is cls else cls
            return ABCMeta.__call__(made, *args, **kwargs)
        # The factory knows every part, and stands above this one.
        from veloxquant.cache.builder import KVCacheFactory

        bound = inspect.signature(cls.by_hand).bind(*args, **kwargs)
        _check_places(bound.arguments)
        home = _home(cls)
        _check_method(cls, home, bound.arguments["config"])
        before = _instead.set((home, cls))
        try:
            return KVCacheFactory.create(*cls.by_hand(*args, **kwargs))
        finally:
            _instead.reset(before)

    def by_hand(
        cls, config: KVCacheConfig, *, rope: Any | None = None
    ) -> tuple[KVCacheConfig, LayerContext]:
        """Settings and place of a layer made by hand, here one by itself.

        `rope` is the position encoding of its keys, for methods that turn keys back.
        """
        return config, LayerContext(seed=config.seed, rope=rope)

    @property
    def __signature__(cls) -> inspect.Signature:
        """What the class may be called with by hand, for `help` and editors."""
        return inspect.signature(cls.by_hand).replace(return_annotation=cls)


def _is_by_hand(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    given = args[0] if args else kwargs.get("config")
    has_shape = "shape" in kwargs or any(isinstance(a, LayerShape) for a in args)
    return isinstance(given, KVCacheConfig) and not has_shape


def _check_places(given: Mapping[str, Any]) -> None:
    """Raise unless numbers of layers and groups are integers; whether they exist is asked later."""
    for name in _PLACES:
        value = given.get(name)
        if value is not None and not is_whole(value):
            raise QuantizerConfigError(f"{name}={value!r} is not possible; it must be an integer")


def _home(cls: type) -> type:
    """The class of a method that this one is, or is made from."""
    modules = {row.module for row in TABLE.values()}
    return next((c for c in cls.__mro__ if c.__module__ in modules), cls)


def _check_method(cls: type, home: type, config: KVCacheConfig) -> None:
    """Raise unless the configuration is for the method that `home` serves."""
    row = TABLE.get(config.method)
    if row is not None and row.module == home.__module__:
        return
    wanted = [r.name for r in TABLE.values() if r.module == home.__module__]
    advice = (
        f"it serves {wanted[0]!r}: set method={wanted[0]!r}"
        if wanted
        else "it serves no method by itself: use KVCacheFactory.create(config)"
    )
    raise QuantizerConfigError(f"{cls.__name__} was given method={config.method!r}; {advice}")
