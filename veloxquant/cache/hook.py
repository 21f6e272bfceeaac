"""The attention hook: route views to their cache, everything else to the original function.

mlx-lm's model files import `scaled_dot_product_attention` by name, so the name is replaced in the
base module and in every loaded model module whose attribute is the original. The wrapper looks at
the type of `keys` only: layers that share keys pass another layer's views and no cache.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from veloxquant.cache.residual import detach_all
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


class _Pair(NamedTuple):
    original: Callable[..., Any]
    wrapper: Callable[..., Any]


_installed: dict[str, _Pair] = {}


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


def _replace(host: Host, old: Callable[..., Any], new: Callable[..., Any]) -> int:
    """Rebind the name wherever it is `old`; returns in how many modules."""
    found = [m for m in _modules(host) if getattr(m, host.function, None) is old]
    for module in found:
        setattr(module, host.function, new)
    return len(found)


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
        pair = _installed.get(host.base)
        if pair is None:
            original = getattr(base, host.function)
            pair = _installed[host.base] = _Pair(original, _wrap(original))
        replaced += _replace(host, pair.original, pair.wrapper)
    return replaced


def detach() -> int:
    """Put the original functions back, and the classes of layers that are watched.

    Returns:
        Number of modules whose name was restored.
    """
    detach_all()
    restored = 0
    for host in HOSTS:
        pair = _installed.pop(host.base, None)
        if pair is not None:
            restored += _replace(host, pair.wrapper, pair.original)
    return restored


def is_attached() -> bool:
    """Whether any host package is hooked."""
    return bool(_installed)
