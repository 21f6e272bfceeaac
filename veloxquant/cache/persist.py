"""Save and load the caches of one sequence, packed as they are.

A file is a safetensors archive: arrays under the path they have in the state tree, everything else
as JSON in the metadata. Classes are never named in a file; the method is looked up in the table,
and the state is given to caches that the caller's plan builds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from veloxquant.cache.builder import new_caches
from veloxquant.cache.probe import ModelPlan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import CacheStateError

FORMAT_VERSION = 1
_FORMAT = "veloxquant_cache"


def _flatten(tree: Any, path: str, arrays: dict[str, mx.array]) -> Any:
    """Replace every array by a reference and collect it under its path."""
    if isinstance(tree, mx.array):
        arrays[path] = mx.contiguous(tree)
        return {"$": path}
    if isinstance(tree, dict):
        return {"{": {str(k): _flatten(v, f"{path}.{k}", arrays) for k, v in tree.items()}}
    if isinstance(tree, list | tuple):
        return [_flatten(v, f"{path}.{i}", arrays) for i, v in enumerate(tree)]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise CacheStateError(f"cannot save a {type(tree).__name__} at {path}")


def _unflatten(tree: Any, arrays: dict[str, mx.array]) -> Any:
    if isinstance(tree, list):
        return [_unflatten(v, arrays) for v in tree]
    if isinstance(tree, dict):
        if "$" in tree:
            if tree["$"] not in arrays:
                raise CacheStateError(f"the file lacks the array {tree['$']!r}")
            return arrays[tree["$"]]
        return {k: _unflatten(v, arrays) for k, v in tree["{"].items()}
    return tree


def _states(cache: Any) -> Any:
    inner = getattr(cache, "caches", None)
    if inner is not None:
        return {"caches": [_states(c) for c in inner]}
    compact = getattr(cache, "compact_state", None)
    return {"state": compact() if compact is not None else cache.state}


def _restore(cache: Any, saved: Any) -> None:
    inner = getattr(cache, "caches", None)
    if inner is not None:
        for one, state in zip(inner, saved["caches"], strict=True):
            _restore(one, state)
        return
    cache.state = saved["state"]


def save_caches(path: str | Path, caches: list[Any], config: KVCacheConfig) -> int:
    """Write the caches of one sequence to `path` and return the bytes of their arrays.

    Raises:
        CacheStateError: when a cache holds something that cannot be saved.
        OSError: when the file cannot be written.
    """
    arrays: dict[str, mx.array] = {}
    tree = [_flatten(_states(c), str(i), arrays) for i, c in enumerate(caches)]
    head = {"version": FORMAT_VERSION, "method": config.method, "tree": tree}
    mx.eval(list(arrays.values()))
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial.safetensors")
    # An archive needs one array at least; an empty cache has none.
    payload = arrays or {"empty": mx.zeros(1)}
    mx.save_safetensors(str(partial), payload, {_FORMAT: json.dumps(head)})
    partial.replace(target)
    return sum(a.nbytes for a in arrays.values())


def load_caches(path: str | Path, plan: ModelPlan, config: KVCacheConfig) -> list[Any]:
    """Caches of one sequence from a file that `save_caches` wrote with the same configuration.

    Raises:
        CacheStateError: when the file is of another version, method or model.
        FileNotFoundError: when there is no such file.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"no saved cache at {source}")
    try:
        arrays, metadata = mx.load(str(source), format="safetensors", return_metadata=True)  # type: ignore[misc]
        head = json.loads(metadata[_FORMAT])
    except (RuntimeError, KeyError, ValueError) as error:
        raise CacheStateError(f"{source.name} is not a saved cache: {error}") from error
    if head.get("version") != FORMAT_VERSION:
        raise CacheStateError(
            f"{source.name} has format {head.get('version')}; this version reads {FORMAT_VERSION}"
        )
    if head["method"] != config.method:
        raise CacheStateError(
            f"{source.name} was saved with method {head['method']!r}, asked for {config.method!r}"
        )
    caches = new_caches(plan, config)
    tree = _unflatten(head["tree"], arrays)  # type: ignore[arg-type]
    if len(tree) != len(caches):
        raise CacheStateError(
            f"{source.name} holds {len(tree)} layers, this model has {len(caches)}"
        )
    for cache, saved in zip(caches, tree, strict=True):
        _restore(cache, saved)
    return caches
