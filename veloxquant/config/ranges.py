"""What the checks of the methods are made of: refusals that name field, value and legal range."""

from collections.abc import Iterable
from typing import Any

from veloxquant.config.kv_cache import KVCacheConfig, defaults
from veloxquant.core.exceptions import QuantizerConfigError

AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
MOST_SINKS = 4_096
CODEBOOK_BITS = (1, 2, 3, 4, 5, 6)


def refuse(field: str, value: Any, legal: str) -> QuantizerConfigError:
    """The error for one field out of its range."""
    return QuantizerConfigError(f"{field}={value!r} is not possible; {field} must be {legal}")


def real(
    config: KVCacheConfig, field: str, low: float, high: float, *, open_low: bool = False
) -> float:
    """The field's value, a number within [low, high], or (low, high] if `open_low`."""
    value = getattr(config, field)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_low and value == low):
        raise refuse(
            field, value, f"a number {'above' if open_low else 'from'} {low} and up to {high}"
        )
    return float(value)


def flag(config: KVCacheConfig, field: str) -> bool:
    """The field's value, True or False."""
    value = getattr(config, field)
    if not isinstance(value, bool):
        raise refuse(field, value, "True or False")
    return value


def one_of(config: KVCacheConfig, field: str, legal: Iterable[Any]) -> None:
    """Raise unless the field holds one of `legal`; neither True nor 1.0 is 1 here."""
    value, legal = getattr(config, field), tuple(legal)
    if not isinstance(value, int | str) or isinstance(value, bool) or value not in legal:
        raise refuse(field, value, "one of " + ", ".join(map(str, legal)))


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number by its type: neither 2.0 nor True is."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer(config: KVCacheConfig, field: str, low: int, high: int | None = None) -> int:
    """The field's value, an int within [low, high]; raise otherwise."""
    value = getattr(config, field)
    if not is_whole(value) or value < low or (high is not None and value > high):
        bound = f"an integer of at least {low}" + ("" if high is None else f" and at most {high}")
        raise refuse(field, value, bound)
    return value


def sinks(config: KVCacheConfig, field: str) -> int:
    """The field's value, first tokens that stay exact; their buffer is made whole at the first."""
    return integer(config, field, 0, MOST_SINKS)


def bits(config: KVCacheConfig, legal: tuple[int, ...]) -> None:
    """Check `bit_width_inlier`, an int or one int a layer."""
    value = config.bit_width_inlier
    widths = value if isinstance(value, list) else [value]
    if not widths:
        raise refuse("bit_width_inlier", value, "an integer or a list with one integer a layer")
    for width in widths:
        if not is_whole(width) or width not in legal:
            raise refuse("bit_width_inlier", width, "one of " + ", ".join(map(str, legal)))


def idle(config: KVCacheConfig, field: str, wants: str) -> None:
    """Raise when a field is away from its default although only `wants` would read it."""
    default = defaults()[field]
    if getattr(config, field) != default:
        raise refuse(
            field, getattr(config, field), f"{default!r}: without {wants} it has no effect"
        )
