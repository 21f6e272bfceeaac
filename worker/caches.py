"""The engine's caches: which method, made for this model, and what they hold.

Everything that knows how a cache is built or measured is here; the engine only moves lists.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from veloxquant.cache.table import row_of
from veloxquant.config.kv_cache import BASELINE, KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.planning import method_settings
from veloxquant.supervisor.messages import LaunchSpec
from veloxquant.worker.faults import WorkerFault


def config_of(spec: LaunchSpec) -> KVCacheConfig:
    """The cache configuration of a launch.

    Raises:
        WorkerFault: `usage` for an unknown method or option or a value out of range;
            `unsupported` for a method that is not built yet.
    """
    try:
        config = method_settings.config_of(spec.method, spec.options)
    except (QuantizerConfigError, method_settings.SettingsError, TypeError) as error:
        raise WorkerFault("usage", str(error)) from error
    if not row_of(spec.method).is_ready:
        raise WorkerFault("unsupported", f"The method {spec.method} is not built yet.")
    return config


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """How caches are made for the loaded model.

    `kinds` and `formats` describe each cache entry; `compressed` counts layers of the method.
    `fitted` is what the calibration in use says of itself, None without one.
    """

    config: KVCacheConfig
    make: Callable[[], list[Any]]
    kinds: list[str]
    formats: list[str]
    compressed: int
    warnings: list[str]
    fitted: Mapping[str, Any] | None = None

    @property
    def n_layers(self) -> int:
        """Number of cache entries."""
        return len(self.kinds)

    def new(self) -> list[Any]:
        """Fresh caches for one request."""
        return self.make()


def plain_caches(model: Any) -> list[Any]:
    """The caches that the model itself asks for."""
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def plan_for(model: Any, config: KVCacheConfig) -> CachePlan:
    """Decide once how this model's caches are made.

    Raises:
        WorkerFault: `unsupported` when the method cannot serve this model.
    """
    names = [type(entry).__name__ for entry in plain_caches(model)]
    from veloxquant.cache.builder import new_caches, plan_model

    try:
        plan = plan_model(model, config)
    except QuantizerConfigError as error:
        raise WorkerFault("unsupported", str(error)) from error
    if not plan.batchable:
        raise WorkerFault(
            "unsupported", f"This model cannot serve several requests at once: {plan.no_batch}."
        )
    is_baseline = config.method == BASELINE
    kind = "plain" if is_baseline else "compressed"
    ours = {layer.path[0] for layer in plan.layers if layer.kind == "compressed"}
    return CachePlan(
        config,
        lambda: new_caches(plan, config),
        [kind if i in ours else "native" for i in range(len(names))],
        [config.method if i in ours else name for i, name in enumerate(names)],
        0 if is_baseline else plan.compressed,
        list(plan.warnings),
        plan.fitted,
    )


def rows_held(caches: Iterable[Any], row: int) -> int | None:
    """Most tokens that a layer of our own holds for one row of a batch; None without such."""
    from veloxquant.cache.batch import RowBatch  # MLX: not before the model is known to be there

    held = [cache.rows[row].rows for cache in _flat(caches) if isinstance(cache, RowBatch)]
    return max(held) if held else None


def _flat(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        inner = getattr(cache, "caches", None)
        if inner is None:
            yield cache
        else:
            yield from _flat(inner)


def layer_bytes(cache_lists: Iterable[list[Any]], n_layers: int) -> list[int]:
    """Bytes by layer that the caches of several lists say they hold."""
    out = [0] * n_layers
    for caches in cache_lists:
        for index, cache in enumerate(caches):
            out[index] += cache.nbytes
    return out
