"""The engine's caches: which method, made for this model, and what they hold.

Everything that knows how a cache is built or measured is here; the engine only moves lists.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from veloxquant.cache.table import row_of
from veloxquant.config.kv_cache import BASELINE, CommonOptions, KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.supervisor.messages import LaunchSpec
from veloxquant.worker.faults import WorkerFault

_COMMON = {f.name for f in dataclasses.fields(CommonOptions)} - {"method", "options", "observers"}


def config_of(spec: LaunchSpec) -> KVCacheConfig:
    """The cache configuration of a launch.

    Raises:
        WorkerFault: `usage` for an unknown method or option or a value out of range;
            `unsupported` for a method that is not built yet.
    """
    try:
        row = row_of(spec.method)
        own = {f.name for f in dataclasses.fields(row.options)}
        for name in spec.options:
            if name not in own | _COMMON:
                known = ", ".join(sorted(own | _COMMON))
                raise WorkerFault("usage", f"{spec.method} has no option {name!r}; known: {known}.")
        method = {name: value for name, value in spec.options.items() if name in own}
        common = {name: value for name, value in spec.options.items() if name not in own}
        config = KVCacheConfig(method=spec.method, options=row.options(**method), **common)
        row.check(config)
        if not row.is_ready:
            raise WorkerFault("unsupported", f"The method {spec.method} is not built yet.")
    except (QuantizerConfigError, TypeError) as error:
        raise WorkerFault("usage", str(error)) from error
    return config


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """How caches are made for the loaded model. `kinds` says per layer what is used."""

    config: KVCacheConfig
    model: Any
    kinds: list[str]
    formats: list[str]
    compressed: int
    warnings: list[str]

    @property
    def n_layers(self) -> int:
        """Number of cache entries."""
        return len(self.kinds)

    def new(self) -> list[Any]:
        """Fresh caches for one request."""
        return plain_caches(self.model)


def plain_caches(model: Any) -> list[Any]:
    """The caches that the model itself asks for."""
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def plan_for(model: Any, config: KVCacheConfig) -> CachePlan:
    """Decide once how this model's caches are made.

    Raises:
        WorkerFault: `unsupported` when the method cannot serve this model.
    """
    if config.method != BASELINE:
        raise WorkerFault("unsupported", f"The method {config.method} is not built yet.")
    entries = plain_caches(model)
    _require_batching(entries)
    kinds = [type(entry).__name__ for entry in entries]
    return CachePlan(config, model, kinds, [""] * len(kinds), 0, [])


def _require_batching(entries: Iterable[Any]) -> None:
    for index, entry in enumerate(entries):
        if not hasattr(entry, "merge"):
            raise WorkerFault(
                "unsupported",
                f"Layer {index} of this model needs {type(entry).__name__}, "
                "which cannot serve several requests at once.",
            )


def layer_bytes(cache_lists: Iterable[list[Any]], n_layers: int) -> list[int]:
    """Bytes by layer that the caches of several lists say they hold."""
    out = [0] * n_layers
    for caches in cache_lists:
        for index, cache in enumerate(caches):
            out[index] += cache.nbytes
    return out
