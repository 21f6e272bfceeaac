"""The last model, method and context that were started, to propose them again."""

import contextlib
import json
from typing import Any

from veloxquant.config.files import write_atomically
from veloxquant.config.folders import folders

_TYPES = {"model": str, "method": str, "context": int}


def _path() -> Any:
    return folders().state / "last_start.json"


def load_last() -> dict[str, Any]:
    """`model`, `method` and `context` of the last start; empty when unknown or unreadable."""
    try:
        value = json.loads(_path().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {key: value[key] for key, kind in _TYPES.items() if isinstance(value.get(key), kind)}


def save_last(model: str, method: str, context: int) -> None:
    """Remember a start; a folder that cannot be written is not worth an error."""
    text = json.dumps({"model": model, "method": method, "context": context})
    with contextlib.suppress(OSError):
        write_atomically(_path(), text + "\n")
