"""The last start: model, method with its settings, and context, to propose it again."""

import contextlib
import json
from typing import Any

from veloxquant.config.files import write_atomically
from veloxquant.config.folders import folders

_TYPES = {"model": str, "method": str, "context": int, "options": dict}


def _path() -> Any:
    return folders().state / "last_start.json"


def load_last() -> dict[str, Any]:
    """`model`, `method`, `context` and, if any, `options` of the last start; empty when unknown."""
    try:
        value = json.loads(_path().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {key: value[key] for key, kind in _TYPES.items() if isinstance(value.get(key), kind)}


def save_last(model: str, method: str, context: int, options: dict[str, Any] | None = None) -> None:
    """Remember a start; a folder that cannot be written is not worth an error."""
    record: dict[str, Any] = {"model": model, "method": method, "context": context}
    text = json.dumps(record | ({"options": options} if options else {}))
    with contextlib.suppress(OSError):
        write_atomically(_path(), text + "\n")
