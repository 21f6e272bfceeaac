"""The attention hook: route views to their cache, everything else to the original function.

mlx-lm's model files import `scaled_dot_product_attention` by name, so the name is replaced in the
base module and in every loaded model module whose attribute is the original. The wrapper looks at
the type of `keys` only: layers that share keys pass another layer's views and no cache.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from veloxquant.cache.view import CacheView


class Host(NamedTuple):
    """A package whose models call one attention function by name."""

    base: str
    models: str
    function: str


HOSTS = (
    Host("mlx_lm.models.base", "mlx_lm.models.", "scaled_dot_product_attention"),
    Host("mlx_vlm.models.base", "mlx_vlm.models.", "scaled_dot_product_attention"),
)

_originals: dict[str, Callable[..., Any]] = {}


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        queries: Any,
        keys: Any,
        values: Any,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: Any = None,
        **rest: Any,
    ) -> Any:
        if isinstance(keys, CacheView):
            return keys.attend(queries, values, scale, mask, sinks)
        if sinks is not None:
            rest["sinks"] = sinks
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **rest)

    attention.__wrapped__ = original  # type: ignore[attr-defined]
    return attention


def _modules(host: Host) -> list[ModuleType]:
    names = [n for n in sys.modules if n == host.base or n.startswith(host.models)]
    return [m for n in names if (m := sys.modules.get(n)) is not None]


def attach() -> int:
    """Install the hook in every loaded host package; idempotent.

    Models loaded later take the wrapper from the base module by themselves.

    Returns:
        Number of modules whose name was replaced.
    """
    replaced = 0
    for host in HOSTS:
        base = sys.modules.get(host.base)
        if base is None:
            continue
        current = getattr(base, host.function)
        if host.base not in _originals:
            _originals[host.base] = current
            setattr(base, host.function, _wrap(current))
        wrapper, original = getattr(base, host.function), _originals[host.base]
        for module in _modules(host):
            if getattr(module, host.function, None) is original:
                setattr(module, host.function, wrapper)
                replaced += 1
    return replaced


def detach() -> int:
    """Put the original functions back.

    Returns:
        Number of modules whose name was restored.
    """
    restored = 0
    for host in HOSTS:
        original = _originals.pop(host.base, None)
        base = sys.modules.get(host.base)
        if original is None or base is None:
            continue
        wrapper = getattr(base, host.function)
        for module in _modules(host):
            if getattr(module, host.function, None) is wrapper:
                setattr(module, host.function, original)
                restored += 1
    return restored


def is_attached() -> bool:
    """Whether any host package is hooked."""
    return bool(_originals)
