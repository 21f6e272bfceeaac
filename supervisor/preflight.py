"""What can be known about a launch before a process exists, without MLX.

`config_of` is also how the worker turns the options on the wire into a configuration, so both
judge alike.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from veloxquant.cache.table import MethodRow, row_of
from veloxquant.config.kv_cache import CommonOptions, KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.supervisor.effects import RefusedError
from veloxquant.supervisor.failures import fault
from veloxquant.supervisor.messages import Fault, LaunchSpec
from veloxquant.supervisor.ports import is_loopback

MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
MAX_MODEL_CHARS = 1024
# Fields that hold objects, or that the worker sets from the model and the specification.
_NOT_ON_THE_WIRE = frozenset({"method", "options", "observers", "store", "dtype", "head_dim"})
_POSITIVE = ("context", "batch", "max_tokens", "block_size", "prefill_step", "memory_limit")


def check_spec(spec: LaunchSpec) -> None:
    """Refuse what the server could not use, before anything is started.

    Raises:
        RefusedError: with code `usage`, naming the setting.
    """
    if isinstance(spec.port, bool) or not 1 <= spec.port <= 65_535:
        raise _usage(f"port={spec.port!r} is not possible", "A port is a number from 1 to 65535.")
    for name in _POSITIVE:
        value = getattr(spec, name)
        if value is not None and (isinstance(value, bool) or value < 1):
            raise _usage(f"{name}={value!r} is not possible", f"{name} must be at least 1.")
    if not is_loopback(spec.host) and not spec.api_key:
        raise _usage(
            f"host={spec.host!r} lets other machines in without a key",
            "Turn the API key on, or listen on 127.0.0.1.",
        )
    check_model_name(spec.model)
    config_of(spec)


def check_model_name(model: str) -> None:
    """Accept an absolute folder, `~/...`, or the form of a Hub id.

    Raises:
        RefusedError: with code `usage`.
    """
    is_folder = model.startswith(("/", "~/"))
    named = model[:80]
    if len(model) > MAX_MODEL_CHARS or "\x00" in model:
        raise _usage(f"model={named!r}... is no name", "Give a folder or a Hub id.")
    if not is_folder and (not MODEL_ID.fullmatch(model) or ".." in model):
        raise _usage(
            f"model={named!r} is neither a folder nor a Hub id",
            "Give a folder with its whole path, or an id like mlx-community/Qwen3-0.6B-4bit.",
        )


def config_of(spec: LaunchSpec, **fixed: Any) -> KVCacheConfig:
    """Configuration for the method and options of a specification, checked.

    Args:
        spec: its options are fields of the method's options class or common fields.
        fixed: fields the caller knows better, such as `head_dim`.

    Raises:
        RefusedError: with code `usage`, naming the option.
    """
    try:
        row = row_of(spec.method)
        if not row.is_ready:
            row.load()
        own, common = _split(row, spec.options)
        config = KVCacheConfig(
            **(common | {"method": spec.method, "options": row.options(**own)} | fixed)
        )
        row.check(config)
    except QuantizerConfigError as error:
        raise _usage(str(error), "Correct it and start again.") from error
    return config


def find_model(model: str) -> Path | Fault:
    """The model's folder on this machine, or why there is none; never asks the network.

    A Hub id is looked up in the local Hugging Face cache; this imports `huggingface_hub`, so call
    it off the event loop.
    """
    if model.startswith(("/", "~/")):
        folder = Path(model).expanduser()
        if not folder.is_dir():
            return fault("model_missing", f"there is no folder {folder}")
        return _with_files(folder)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    if not isinstance(found, str):
        return fault("model_missing", f"{model} was not downloaded to this machine")
    return _with_files(Path(found).parent)


def _with_files(folder: Path) -> Path | Fault:
    if not (folder / "config.json").is_file():
        return fault("model_missing", f"{folder} has no config.json")
    if next(folder.glob("*.safetensors"), None) is None:
        return fault("model_missing", f"{folder} has no *.safetensors")
    return folder


def _split(row: MethodRow, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    own_fields = {f.name: f for f in dataclasses.fields(row.options)}
    shared = {f.name for f in dataclasses.fields(CommonOptions)} - _NOT_ON_THE_WIRE
    # Fields that belong to no options class but to methods that read them, like n_sink_tokens.
    shared |= {"n_sink_tokens", "residual_length"} - set(own_fields)
    own: dict[str, Any] = {}
    common: dict[str, Any] = {}
    for name, value in options.items():
        if name in own_fields:
            is_tuple = isinstance(own_fields[name].default, tuple)
            own[name] = tuple(value) if is_tuple and isinstance(value, list) else value
        elif name in shared:
            common[name] = value
        else:
            near = _nearest(name, [*own_fields, *sorted(shared)])
            raise QuantizerConfigError(f"method {row.name!r} has no option {name!r}{near}")
    return own, common


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(known)}"


def _usage(message: str, hint: str) -> RefusedError:
    return RefusedError("usage", message, hint)
