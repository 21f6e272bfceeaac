"""What can be known about a launch before a process exists, without MLX."""

import re
from pathlib import Path

from veloxquant.cache.table import row_of
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.planning.method_settings import SettingsError, config_of
from veloxquant.supervisor.effects import RefusedError
from veloxquant.supervisor.failures import fault
from veloxquant.supervisor.messages import Fault, LaunchSpec
from veloxquant.supervisor.ports import is_loopback

MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
MAX_MODEL_CHARS = 1024
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
    try:
        row = row_of(spec.method)
        if not row.is_ready:
            row.load()
        config_of(spec.method, spec.options)
    except (SettingsError, QuantizerConfigError) as error:
        raise _usage(str(error), "Correct it and start again.") from error


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


def _usage(message: str, hint: str) -> RefusedError:
    return RefusedError("usage", message, hint)
