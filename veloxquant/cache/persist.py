"""Save and load the caches of one sequence, packed as they are.

A file is a safetensors archive: arrays under the path they have in the state tree, everything else
as JSON in the metadata, with a checksum of each array and one of that text. Classes are never named
in a file; the method is looked up in the table, and the state is given to caches that the caller's
plan builds.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from veloxquant.cache.builder import new_caches
from veloxquant.cache.digests import (
    array_digest,
    checksums,
    constants_of,
    text_checksum,
)
from veloxquant.cache.layouts.vector import vecinfer_window
from veloxquant.cache.probe import ModelPlan
from veloxquant.cache.table import row_of
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import CacheStateError

FORMAT_VERSION = 1
FORMAT_MINOR = 1
"""What a file has that readers of the same version may ignore; 1: checksums."""
_FORMAT = "veloxquant_cache"
_HEAD_SUM = "veloxquant_cache_crc32"
# Common fields that decide what packed arrays mean; those of the method come beside them.
_COMMON = ("bit_width_inlier", "seed", "residual_length", "n_sink_tokens", "eviction_storage")
_ARRAYS = ("smooth_factors", "key_codebook", "value_codebook")
_DIGEST = "sha256"
_MISFIT = (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError)


def _settings(config: KVCacheConfig) -> dict[str, Any]:
    """The settings that a file must share with whoever loads it, as JSON gives them back.

    Of arrays it is a digest.
    """
    own = [f.name for f in dataclasses.fields(row_of(config.method).options)]
    values = {name: getattr(config, name, None) for name in (*_COMMON, *own)}
    if config.method == "vecinfer":
        values["residual_length"] = vecinfer_window(config)
    plain = (bool, int, float, str, list, tuple, dict, type(None))
    kept = {k: v for k, v in values.items() if isinstance(v, plain)}
    given = {k: v for k, v in values.items() if isinstance(v, mx.array | np.ndarray)}
    given |= {k: v for k in _ARRAYS if (v := getattr(config, k)) is not None}
    kept |= {k: {_DIGEST: array_digest(v)} for k, v in given.items()}
    return json.loads(json.dumps(kept))


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
                raise KeyError(f"array {tree['$']!r} is missing")
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

    The file appears whole or not at all.

    Raises:
        CacheStateError: when a cache holds something that cannot be saved.
        OSError: when the file cannot be written.
    """
    arrays: dict[str, mx.array] = {}
    tree = [_flatten(_states(c), str(i), arrays) for i, c in enumerate(caches)]
    head = {
        "version": FORMAT_VERSION,
        "minor": FORMAT_MINOR,
        "method": config.method,
        "settings": _settings(config),
        "constants": constants_of(caches),
        "tree": tree,
    }
    mx.eval(list(arrays.values()))
    head["crc32"] = checksums(arrays)
    text = json.dumps(head)
    size = sum(a.nbytes for a in arrays.values())
    target = Path(path)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.safetensors")
    # An archive needs one array at least; an empty cache has none.
    payload = arrays or {"empty": mx.zeros(1)}
    try:
        mx.save_safetensors(str(partial), payload, {_FORMAT: text, _HEAD_SUM: text_checksum(text)})
        if partial.stat().st_size < size:
            raise OSError(f"cannot save the cache to {target}: the disk took only a part of it")
        partial.replace(target)
    except RuntimeError as error:
        raise OSError(f"cannot save the cache to {target}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return size


def _read(source: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Arrays, read from the disk now, and the head of a file."""
    try:
        loaded = mx.load(str(source), format="safetensors", return_metadata=True)
        arrays, metadata = cast("tuple[dict[str, mx.array], dict[str, str]]", loaded)
        # Loading is lazy: read now, so that errors of the disk show here.
        mx.eval(list(arrays.values()))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CacheStateError(f"{source.name} is damaged or not a saved cache: {reason}") from error
    try:
        head = json.loads(metadata[_FORMAT])
        version = head["version"]
    except (*_MISFIT,) as error:
        raise CacheStateError(
            f"{source.name} is a safetensors file, but no cache that save_caches wrote"
        ) from error
    if version != FORMAT_VERSION:
        raise CacheStateError(
            f"{source.name} has format {version}; this version reads {FORMAT_VERSION}"
        )
    _require_sums(source.name, arrays, metadata, head)
    return arrays, head


def _require_sums(
    name: str, arrays: dict[str, mx.array], metadata: dict[str, str], head: dict[str, Any]
) -> None:
    """Make sure that nothing changed since the file was written; the first files cannot tell."""
    if not head.get("minor") and _HEAD_SUM not in metadata:
        return
    sums = head.get("crc32")
    if metadata.get(_HEAD_SUM) != text_checksum(metadata[_FORMAT]) or not isinstance(sums, dict):
        changed = "its description"
    elif missing := sums.keys() - arrays.keys():
        changed = f"array {min(missing)!r}"
    else:
        found = checksums({path: arrays[path] for path in sums})
        path = next((path for path in sums if found[path] != sums[path]), None)
        if path is None:
            return
        changed = f"array {path!r}"
    raise CacheStateError(
        f"{name} is damaged: {changed} is not what was written; read the prompt again"
    )


def _require_same(name: str, head: dict[str, Any], config: KVCacheConfig) -> None:
    if head.get("method") != config.method:
        raise CacheStateError(
            f"{name} was saved with method {head.get('method')!r}, asked for {config.method!r}"
        )
    was, wanted = head.get("settings"), _settings(config)
    if not isinstance(was, dict):
        raise CacheStateError(f"{name} does not say which settings it was saved with")
    for field in dict.fromkeys((*wanted, *_ARRAYS)):
        value = wanted.get(field)
        if was.get(field) == value:
            continue
        if any(isinstance(v, dict) and _DIGEST in v for v in (was.get(field), value)):
            raise CacheStateError(
                f"{name} was saved with {_which(field, was.get(field))}, asked for "
                f"{_which(field, value)}; codes mean nothing with other arrays, so load it with "
                f"those it was saved with"
            )
        raise CacheStateError(
            f"{name} was saved with {field}={was.get(field)!r}, asked for {field}={value!r}; "
            f"load it with the settings it was saved with"
        )


def _which(field: str, value: Any) -> str:
    """An array-valued setting in words."""
    if isinstance(value, dict):
        return f"{field} of {_DIGEST} {str(value.get(_DIGEST))[:12]}"
    return f"no {field}"


def _require_constants(name: str, head: dict[str, Any], caches: list[Any]) -> None:
    """Make sure that codebooks and rotations are those that the codes were made with."""
    wanted = constants_of(caches)
    was = head.get("constants")
    was = was if isinstance(was, list) else [""] * len(wanted)
    for layer, (held, now) in enumerate(zip(was, wanted, strict=False)):
        if held != now:
            raise CacheStateError(
                f"{name} was saved with another calibration of compressed layer {layer} than there "
                f"is now (codebooks, smooth factors or rotations), and its codes mean nothing "
                f"without it; bring that calibration back, or read the prompt again"
            )


def _require_shapes(name: str, caches: list[Any], plan: ModelPlan) -> None:
    for layer in plan.layers:
        cache: Any = caches[layer.path[0]]
        for i in layer.path[1:]:
            cache = cache.caches[i]
        if layer.kind != "compressed" or layer.shape is None or cache.empty():
            continue
        wanted = (layer.shape.n_kv_heads, layer.shape.k_dim, layer.shape.v_dim)
        found = cache.shape()
        if found is None or (found.n_kv_heads, found.k_dim, found.v_dim) != wanted:
            raise CacheStateError(
                f"{name} was saved from another model: its cache entry {layer.path[0]} has not "
                f"{wanted[0]} heads of {wanted[1]} and {wanted[2]} channels"
            )


def load_caches(path: str | Path, plan: ModelPlan, config: KVCacheConfig) -> list[Any]:
    """Caches of one sequence from a file that `save_caches` wrote with the same configuration.

    Raises:
        CacheStateError: when the file is damaged, naming the array, or of another version, method,
            configuration or model.
        FileNotFoundError: when there is no such file.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"no saved cache at {source}")
    arrays, head = _read(source)
    _require_same(source.name, head, config)
    caches = new_caches(plan, config)
    _require_constants(source.name, head, caches)
    try:
        tree = _unflatten(head["tree"], arrays)
        if len(tree) != len(caches):
            raise CacheStateError(f"it holds {len(tree)} layers, this model has {len(caches)}")
        for cache, saved in zip(caches, tree, strict=True):
            _restore(cache, saved)
    except (*_MISFIT, CacheStateError) as error:
        raise CacheStateError(
            f"{source.name} does not fit the caches of this model: {error}"
        ) from error
    _require_shapes(source.name, caches, plan)
    return caches
