"""Look into one model folder: what it is, whether it is complete, whether it can run."""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from veloxquant.planning.mlx_models import CODE_KEYS, refusal
from veloxquant.planning.safetensors import HeaderError, Tensor, read_header

MAX_CONFIG_BYTES = 8 << 20
MAX_INDEX_BYTES = 64 << 20
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
LICENSE = re.compile(r"^license:\s*[\"']?([\w.+-]+)", re.MULTILINE)


class ModelFilesError(ValueError):
    """Raised when a model folder cannot be read or is not complete; the text says why."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What the headers of the weight files say; `quant` is a label such as `4b` or `bf16`."""

    files: int
    nbytes: int
    params: int
    quant: str


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelFilesError: when it is missing, too large, not JSON, or not an object.
    """
    try:
        about = path.stat()
        # A pipe would be waited on for ever.
        raw = path.read_bytes() if S_ISREG(about.st_mode) and about.st_size <= limit else None
    except FileNotFoundError as error:
        raise ModelFilesError(f"has no {path.name}") from error
    except OSError as error:
        raise ModelFilesError(f"{path.name} cannot be read: {error.strerror}") from error
    if not S_ISREG(about.st_mode):
        raise ModelFilesError(f"{path.name} is not a regular file")
    if raw is None:
        raise ModelFilesError(f"{path.name} is larger than {limit >> 20} MiB")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path.name} is not valid JSON") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path.name} is not a JSON object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The weight files that mlx-lm would load, all of them present.

    Raises:
        ModelFilesError: when there are none, or parts named by the index or by the numbering are
            missing.
    """
    found = sorted(folder.glob("model*.safetensors"))
    names = {path.name for path in found if path.is_file()}
    expected: set[str] = set()
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        parts = read_json(index, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(parts, dict):
            raise ModelFilesError(f"{index.name} has no weight_map")
        expected = {str(part) for part in parts.values()}
    for name in names:
        if match := SHARD.fullmatch(name):
            width, count = len(match[2]), min(int(match[2]), 10_000)
            expected |= {
                f"model-{i:0{width}}-of-{match[2]}.safetensors" for i in range(1, count + 1)
            }
    if missing := sorted(expected - names):
        raise ModelFilesError(
            f"incomplete: {len(missing)} of {len(expected)} weight files are missing "
            f"({missing[0]}{' and others' if len(missing) > 1 else ''})"
        )
    if broken := [path.name for path in found if path.name not in names]:
        raise ModelFilesError(f"incomplete: {broken[0]} is a broken link")
    if not names:
        other = next(folder.glob("*.gguf"), None) or next(folder.glob("*.bin"), None)
        kind = f"; {other.suffix} files are not used" if other else ""
        raise ModelFilesError(f"has no safetensors weights{kind}")
    return found


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Arrays of all weight files by name; each file's size is checked against its header.

    Raises:
        ModelFilesError: as `weight_files`, and for a damaged file.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            state = path.stat()
            tensors |= _header(path, state.st_size, state.st_mtime_ns)
        except HeaderError as error:
            raise ModelFilesError(str(error)) from error
        except OSError as error:
            raise ModelFilesError(f"{path.name} cannot be read: {error.strerror}") from error
    return tensors


@functools.lru_cache(maxsize=512)
def _header(path: Path, size: int, changed: int) -> dict[str, Tensor]:  # noqa: ARG001 - the key
    return read_header(path)


def quantization(config: dict[str, Any]) -> dict[str, Any]:
    """The quantisation entry of a `config.json`; empty when there is none."""
    for key in ("quantization", "quantization_config"):
        if isinstance(value := config.get(key), dict):
            return value
    return {}


def summarise(tensors: dict[str, Tensor], config: dict[str, Any]) -> Weights:
    """Parameters and bytes of a set of weights; packed words count as the values they hold."""
    table = quantization(config)
    group = table.get("group_size") or 0
    params, plain = 0, {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if part in ("scales", "biases") and f"{stem}.weight" in tensors:
            continue
        scales = tensors.get(f"{stem}.scales")
        if part == "weight" and tensor.dtype == "U32" and scales is not None:
            own = table.get(stem)
            width = own.get("group_size") if isinstance(own, dict) else group
            params += scales.size * (width or 0) or tensor.size * 8
        else:
            params += tensor.size
            plain[tensor.dtype] = plain.get(tensor.dtype, 0) + tensor.nbytes
    bits, method = table.get("bits"), table.get("quant_method")
    if isinstance(bits, int):
        quant = f"{bits}b"
    elif isinstance(method, str):
        quant = method
    else:
        quant = max(plain, key=lambda dtype: plain[dtype]).lower() if plain else "-"
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Weights(0, nbytes, params, quant)


def inspect(folder: Path) -> tuple[dict[str, Any], Weights]:
    """Configuration and weights of a model folder that can run.

    Raises:
        ModelFilesError: with the reason when it cannot.
    """
    config = read_json(folder / "config.json")
    tensors = read_weights(folder)
    _refuse_code(folder, config)
    if reason := refusal(config):
        raise ModelFilesError(reason)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ModelFilesError("has no tokenizer")
    return config, summarise(tensors, config)


def _refuse_code(folder: Path, config: dict[str, Any]) -> None:
    """Raise when the model asks to run Python code of its own, as the worker would."""
    tables = {"config.json": config}
    if (folder / "tokenizer_config.json").is_file():
        tables["tokenizer_config.json"] = read_json(folder / "tokenizer_config.json")
    for file, table in tables.items():
        for key in CODE_KEYS:
            if table.get(key):
                raise ModelFilesError(
                    f"{file} asks to run the model's own Python code ({key}), which is never done"
                )


def has_chat_template(folder: Path) -> bool:
    """Whether the folder brings a template for chats."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(read_json(folder / "tokenizer_config.json").get("chat_template"))
    except ModelFilesError:
        return False


def license_of(folder: Path) -> str:
    """Licence named in the head of the model card; empty when unknown."""
    try:
        with (folder / "README.md").open("rb") as file:
            head = file.read(8192).decode("utf-8", "replace")
    except OSError:
        return ""
    if not head.startswith("---"):
        return ""
    match = LICENSE.search(head.split("\n---", 1)[0])
    return match[1] if match else ""
