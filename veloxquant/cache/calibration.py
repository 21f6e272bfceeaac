"""Constants that a method fits to a model: made once, kept in a store, found again by `for_model`.

A method takes part by defining `fit` (and `fit_shared`) beside `build`, see `fit_method`. What is
kept belongs to one model: its key is a fingerprint of names, shapes and values of its weights, so
a file can lie under no wrong name, and models that were loaded in another type still find theirs.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import mlx.core as mx
import numpy as np

from veloxquant.artifacts import Calibration, NpyArtifactStore
from veloxquant.cache.context import LayerSample
from veloxquant.cache.probe import ModelPlan
from veloxquant.cache.sampling import silent
from veloxquant.cache.table import TABLE, MethodRow, row_of
from veloxquant.config.folders import folders
from veloxquant.config.kv_cache import STANDALONE_METHODS, KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError

_SAMPLED = 16
"""Values of each weight that enter the fingerprint."""
_DIGITS = 24


@runtime_checkable
class CalibrationStore(Protocol):
    """A store that keeps calibrations; both artifact stores of the library do."""

    def save_calibration(self, model: str, method: str, calibration: Calibration) -> None:
        """Keep what a method's fitter found for the model with this key."""
        ...

    def load_calibration(self, model: str, method: str) -> Calibration | None:
        """What was kept, None without."""
        ...


def user_store() -> NpyArtifactStore:
    """The store in the user's data folder, where `vq precompute MODEL` writes."""
    return NpyArtifactStore(folders().data / "artifacts")


def fingerprint(model: Any) -> str:
    """The key of a loaded model: equal for equal weights, whatever float type they are held in."""
    from mlx.utils import tree_flatten

    weights = sorted(cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())))
    described = hashlib.sha256()
    values: list[mx.array] = []
    for name, array in weights:
        described.update(f"{name} {array.shape}\n".encode())
        row = array[(0,) * (array.ndim - 1)] if array.ndim else array[None]
        row = row[:_SAMPLED]
        if mx.issubdtype(array.dtype, mx.integer):
            row = row & 0xFFFF  # packed words, cut to what fp32 holds exactly
        values.append(row.astype(mx.float32))
    if values:
        described.update(np.array(mx.concatenate(values)).tobytes())
    return described.hexdigest()[:_DIGITS]


def fitters() -> list[str]:
    """Ready methods that can be calibrated."""
    return [
        row.name
        for row in TABLE.values()
        if row.is_ready and row.calibration != "none" and hasattr(row.load(), "fit")
    ]


def _values(row: MethodRow, config: KVCacheConfig) -> dict[str, Any]:
    """The settings that fitted arrays depend on, as JSON holds them."""
    names = getattr(row.load(), "FIT_FIELDS", None)
    if names is None:
        names = [field.name for field in dataclasses.fields(row.options)]
    found: dict[str, Any] = {}
    for name in names:
        value = getattr(config, name)
        if value is None or isinstance(value, bool | int | float | str | list | tuple):
            found[name] = value
    return json.loads(json.dumps(found))


def _shapes(plan: ModelPlan) -> list[list[int]]:
    return [list(shape[:4]) for shape in plan.shapes()]


def fit_method(
    plan: ModelPlan,
    samples: Sequence[LayerSample],
    config: KVCacheConfig,
    *,
    about: Mapping[str, Any] | None = None,
    report: Callable[[int, int], None] = silent,
) -> Calibration:
    """Fit the constants of `config.method` to samples of every layer.

    The method's module defines `fit(sample, config) -> dict` of arrays of one layer, and, where
    layers share constants, `fit_shared(samples, config) -> dict` of arrays of the model; both are
    called with keywords. `FIT_FIELDS` names the settings that the arrays depend on, by default
    all of the method's own.

    Args:
        plan: what the probe found.
        samples: one a compressed layer, see `cache/sampling.py`.
        config: the method and its settings.
        about: what else the file should tell; values that JSON holds.
        report: gets layers done and layers in all.

    Raises:
        QuantizerConfigError: when the method has no fitter or cannot work with the settings.
    """
    row = row_of(config.method)
    row.check(config)
    module = row.load()
    if not hasattr(module, "fit") and not hasattr(module, "fit_shared"):
        raise QuantizerConfigError(
            f"method {row.name!r} fits nothing to a model; those that do: {', '.join(fitters())}"
        )
    shared: dict[str, Any] = {}
    if hasattr(module, "fit_shared"):
        shared = module.fit_shared(samples=samples, config=config)
    layers: list[dict[str, Any]] = []
    for index in range(len(samples)):
        sample = samples[index]
        own = config.with_fields(head_dim=sample.shape.k_dim)
        found = module.fit(sample=sample, config=own) if hasattr(module, "fit") else {}
        mx.eval([a for a in found.values() if isinstance(a, mx.array)])
        layers.append(dict(found))
        report(index + 1, len(samples))
    meta = dict(about or {}) | {"fields": _values(row, config), "shapes": _shapes(plan)}
    return Calibration(layers, dict(shared), meta)


def artifacts_for(plan: ModelPlan, config: KVCacheConfig) -> list[Mapping[str, mx.array]]:
    """What a store holds for this model and method: one mapping a compressed layer, or none.

    Looks into `config.store` when it keeps calibrations, else into the user's store. A calibration
    that does not fit is left alone, and the plan's warnings say why; of one that is used the plan
    keeps what it says of itself.

    Raises:
        QuantizerConfigError: when `config.store` is no store that the method could read.
    """
    row = row_of(config.method)
    if row.calibration == "none":
        return []
    given = config.store if isinstance(config.store, CalibrationStore) else None
    # The standalone methods read matrices from stores that keep nothing else.
    if config.store is not None and given is None and row.name not in STANDALONE_METHODS:
        raise QuantizerConfigError(
            f"store={config.store!r} keeps no calibrations, which is what method {row.name!r} "
            f"looks for; give an NpyArtifactStore(folder), or leave it unset for the user's store"
        )
    if not plan.compressed:
        return []
    store = user_store() if given is None else given
    if isinstance(store, NpyArtifactStore) and not (store.root / "calibration").is_dir():
        return []
    found = store.load_calibration(fingerprint(plan.model), row.name)
    if found is None:
        return []
    if reason := _misfit(found, plan, row, config):
        plan.warnings.append(
            f"The calibration of {row.name!r} for this model is not used: {reason}. "
            f"`vq precompute` makes a new one."
        )
        return []
    plan.fitted = found.meta
    shared = _arrays(found.shared)
    return [shared | _arrays(layer) for layer in found.layers]


def _misfit(found: Calibration, plan: ModelPlan, row: MethodRow, config: KVCacheConfig) -> str:
    if len(found.layers) != plan.compressed or found.meta.get("shapes") != _shapes(plan):
        return "it was made for layers of other shapes"
    made, now = found.meta.get("fields", {}), _values(row, config)
    for name, value in now.items():
        if made.get(name) != value:
            return f"it was made with {name}={made.get(name)!r}, the settings say {value!r}"
    return ""


def _arrays(given: Mapping[str, Any]) -> dict[str, mx.array]:
    """Arrays of MLX; copies of a cache and all sequences share them."""
    return {
        name: value if isinstance(value, mx.array) else mx.array(np.asarray(value))
        for name, value in given.items()
    }
