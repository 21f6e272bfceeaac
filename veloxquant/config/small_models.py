"""More bits where nobody chose any: two of them garble the answers of small models."""

from typing import Any

from veloxquant.config.common_fields import READERS

SMALL_PARAMS = 1_000_000_000
"""Parameters below which two bits garble answers (measured on the 135M demo model)."""
SMALL_BITS = 4
BITS = "bit_width_inlier"


def is_small(params: int | None) -> bool:
    """Whether a model of so many parameters wants more bits; an unknown number does not say so."""
    return params is not None and params < SMALL_PARAMS


def options_for(method: str, params: int | None) -> dict[str, Any]:
    """What to set of a method whose bits nobody chose, for a model of `params` parameters."""
    return {BITS: SMALL_BITS} if is_small(params) and method in READERS[BITS] else {}


def options_by_method(params: int | None) -> dict[str, dict[str, Any]]:
    """The same for every method that has such settings."""
    return {method: options for method in READERS[BITS] if (options := options_for(method, params))}
