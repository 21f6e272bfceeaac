"""What must be true of a model before anything heavy is imported or loaded.

Names come from the launch specification only, never from a request. Weights are safetensors whose
headers fit their files; a model that wants to run its own code is refused.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from veloxquant.config.folders import folders
from veloxquant.planning.safetensors import HeaderError, Tensor, read_header
from veloxquant.worker.faults import WorkerFault

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FLOATS = frozenset({"F16", "BF16", "F32"})
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_CODE_KEYS = ("auto_map", "model_file")


class Gated(NamedTuple):
    """A model that may be loaded: its folder, public name, configuration and weight files."""

    path: Path
    model_id: str
    config: dict[str, Any]
    shards: list[Path]
    tensors: list[Tensor]

    @property
    def file_bytes(self) -> int:
        """Bytes of the weights as stored."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def loaded_bytes(self, *, as_float32: bool) -> int:
        """Bytes of the weights in memory, where 16-bit floats may become 32-bit ones."""
        return sum(
            4 * tensor.size if as_float32 and tensor.dtype in _FLOATS else tensor.nbytes
            for tensor in self.tensors
        )


def open_gate(model: str, name: str | None = None) -> Gated:
    """Find a model on this machine and check its files.

    Args:
        model: a folder, the name of one in the user's model folder, or a Hub id that was fetched.
        name: the name that clients use; by default the folder's or the Hub's.

    Raises:
        WorkerFault: `model_missing`, `bad_model` or `unsupported`, naming the file.
    """
    path = _find(model)
    config = _read_json(path / "config.json")
    for key, where in (("config.json", config), *_optional_json(path, "tokenizer_config.json")):
        _refuse_code(key, where)
    shards = sorted(path.glob("model*.safetensors"))
    if not shards:
        raise WorkerFault("bad_model", f"{path.name} holds no model*.safetensors file.")
    _check_index(path, shards)
    if not any((path / file).is_file() for file in _TOKENIZERS):
        raise WorkerFault("bad_model", f"{path.name} holds no tokenizer (tokenizer.json).")
    tensors: list[Tensor] = []
    for shard in shards:
        try:
            tensors += read_header(shard).values()
        except (HeaderError, OSError) as error:
            raise WorkerFault("bad_model", str(error)) from error
    public = name or (model if _looks_like_hub_id(model) else path.name)
    return Gated(path, public, config, shards, tensors)


def _looks_like_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None and ".." not in model


def _find(model: str) -> Path:
    given = Path(model).expanduser()
    if given.is_absolute():  # a relative path would mean another folder here than for the user
        if not given.is_dir():
            raise WorkerFault("model_missing", f"There is no folder {model}.")
        return given.resolve()
    if not _looks_like_hub_id(model):
        raise WorkerFault("model_missing", f"{model!r} is neither a folder nor a model's name.")
    root = folders().models.resolve()
    own = (root / model).resolve()
    if own.is_relative_to(root) and own.is_dir():
        return own
    return _find_in_hub_cache(model)


def _find_in_hub_cache(model: str) -> Path:
    # imported here: 0.3 s that a plain folder does not need
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, FileNotFoundError) as error:
        raise WorkerFault("model_missing", f"{model!r} has not been fetched.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise WorkerFault("bad_model", f"{path.parent.name} holds no {path.name}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise WorkerFault("bad_model", f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise WorkerFault("bad_model", f"{path.name} is not a table.")
    return value


def _optional_json(path: Path, name: str) -> list[tuple[str, dict[str, Any]]]:
    return [(name, _read_json(path / name))] if (path / name).is_file() else []


def _refuse_code(file: str, table: dict[str, Any]) -> None:
    for key in _CODE_KEYS:
        if table.get(key):
            raise WorkerFault(
                "unsupported",
                f"{file} asks to run the model's own Python code ({key}), which is never done.",
            )


def _check_index(path: Path, shards: list[Path]) -> None:
    """Every file that an index names must be there; without an index the files speak."""
    for _, index in _optional_json(path, "model.safetensors.index.json"):
        named = index.get("weight_map")
        if not isinstance(named, dict):
            raise WorkerFault("bad_model", "model.safetensors.index.json has no weight_map.")
        missing = sorted(set(map(str, named.values())) - {shard.name for shard in shards})
        if missing:
            raise WorkerFault("bad_model", f"{missing[0]} is missing from {path.name}.")
