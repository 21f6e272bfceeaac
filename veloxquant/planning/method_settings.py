"""Settings of a method: which there are, how they are written, and the configuration they make.

One parser for the command line, the panel and the worker; types come from the dataclass fields.
"""

import dataclasses
import functools
import math
import types
import typing
from typing import Any

from veloxquant.cache.table import MethodRow, row_of
from veloxquant.config.common_fields import READERS
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import Unsaid
from veloxquant.core.exceptions import QuantizerConfigError

COMMON_FIELDS = (
    "bit_width_inlier", "residual_length", "n_sink_tokens", "jl_dim", "seed", "eviction_storage"
)  # fmt: skip
"""Common fields that text can set, for the methods that read them."""
BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


class SettingsError(ValueError):
    """Raised for a setting that a method does not have, or a text that is no value of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class MethodField:
    """One setting: `kind` is int, float, bool, str, array or unknown."""

    name: str
    kind: str
    default: Any
    optional: bool
    choices: tuple[Any, ...] = ()
    one_or_more: bool = False


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(KVCacheConfig)


def field_names(row: MethodRow) -> tuple[str, ...]:
    """Settings that mean something to a method, its own options first."""
    own = tuple(field.name for field in dataclasses.fields(row.options))
    common = (name for name in COMMON_FIELDS if row.name in READERS[name])
    return own + tuple(name for name in common if name not in own)


@functools.cache
def fields_of(method: str) -> dict[str, MethodField]:
    """The settings of a method by name.

    Raises:
        QuantizerConfigError: for an unknown method.
    """
    known = {field.name: field for field in dataclasses.fields(KVCacheConfig)}
    return {
        name: _describe(name, _hints()[name], _default(method, known[name].default))
        for name in field_names(row_of(method))
    }


def _default(method: str, default: Any) -> Any:
    """What an unset field means: vecinfer keeps no exact window unless somebody asks for one."""
    if isinstance(default, Unsaid):
        return 0 if method == "vecinfer" else int(default)
    return default


def _describe(name: str, annotation: Any, default: Any) -> MethodField:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = list(typing.get_args(annotation)) if union else [annotation]
    optional = type(None) in parts
    parts = [part for part in parts if part is not type(None)]
    bases = [typing.get_origin(part) or part for part in parts]
    choices: tuple[Any, ...] = ()
    one_or_more = False
    if bases == [typing.Literal]:
        kind, choices = "str", typing.get_args(parts[0])
    elif len(bases) == 1 and bases[0] in (int, float, bool, str):
        kind = bases[0].__name__
    elif bases and bases[0] is int and set(bases[1:]) <= {list, tuple}:
        kind, one_or_more = "int", True
    elif bases and set(bases) <= {list, tuple}:
        kind = "array"
    else:
        kind = "unknown"
    plain = None if default is dataclasses.MISSING else default
    return MethodField(name, kind, plain, optional, choices, one_or_more)


def parse_setting(method: str, name: str, text: str) -> Any:
    """The value of one setting from text; blank clears an optional one, commas make a list.

    Raises:
        SettingsError: naming the legal settings or the legal values.
        QuantizerConfigError: for an unknown method.
    """
    fields = fields_of(method)
    if name not in fields:
        legal = ", ".join(fields) or "none"
        raise SettingsError(f"method {method!r} has no setting {name!r}; it has: {legal}")
    field, text = fields[name], text.strip()
    if not text and field.optional:
        return None
    try:
        return _value(field, text)
    except ValueError as error:
        raise SettingsError(
            f"{name}={text!r} is not possible; it must be {_legal(field)}"
        ) from error


def _value(field: MethodField, text: str) -> Any:
    if field.choices and text not in map(str, field.choices):
        raise ValueError(text)
    if field.kind == "array" or (field.one_or_more and "," in text):
        return [int(part) for part in text.strip("[]()").split(",") if part.strip()]
    if field.kind == "int":
        return int(text)
    if field.kind == "float":
        if not math.isfinite(number := float(text)):
            raise ValueError(text)
        return number
    if field.kind == "bool":
        if text.lower() not in BOOLEANS:
            raise ValueError(text)
        return BOOLEANS[text.lower()]
    if field.kind == "str" and text:
        return text
    raise ValueError(text)


def _legal(field: MethodField) -> str:
    if field.choices:
        return "one of " + ", ".join(map(str, field.choices))
    words = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "str": "a text",
        "array": "whole numbers separated by commas",
        "unknown": "set from Python; text cannot express it",
    }[field.kind]
    if field.one_or_more:
        words += " or several separated by commas"
    return words + (", or empty" if field.optional else "")


def config_of(method: str, options: dict[str, Any], head_dim: int = 128) -> KVCacheConfig:
    """The configuration that a method and its settings make, checked.

    Args:
        method: name of the method.
        options: settings by name, with their values.
        head_dim: channels of a head.

    Raises:
        SettingsError: for a setting that the method does not have.
        QuantizerConfigError: for an unknown method or a value out of range.
    """
    fields = fields_of(method)
    # a tuple that went over the wire comes back as a list
    options = {
        name: tuple(value) if isinstance(value, list) and _is_tuple(fields, name) else value
        for name, value in options.items()
    }
    if foreign := [name for name in options if name not in fields]:
        legal = ", ".join(fields) or "none"
        raise SettingsError(f"method {method!r} has no setting {foreign[0]!r}; it has: {legal}")
    row = row_of(method)
    own = {field.name for field in dataclasses.fields(row.options)}
    base = KVCacheConfig(
        method=method,
        head_dim=head_dim,
        options=row.options(**{name: value for name, value in options.items() if name in own}),
    )
    config = base.with_fields(**{n: value for n, value in options.items() if n not in own})
    row.check(config)
    return config


def _is_tuple(fields: dict[str, MethodField], name: str) -> bool:
    return name in fields and isinstance(fields[name].default, tuple)


def refusal(method: str, options: dict[str, Any]) -> str:
    """Why these settings cannot work; empty when they can."""
    try:
        config_of(method, options)
    except (SettingsError, QuantizerConfigError) as error:
        return str(error)
    return ""
