"""The last start: model, method with its settings, and context, to propose it again.

Of a port only one that was named for that start alone is kept: others are settings, which have a
place of their own and may have changed since.
"""

import contextlib
import json
from typing import Any

from veloxquant.config.files import write_atomically
from veloxquant.config.folders import folders

_TYPES = {"model": str, "method": str, "context": int, "options": dict, "port": int}
_PORTS = range(1, 65_536)


def _path() -> Any:
    return folders().state / "last_start.json"


def load_last() -> dict[str, Any]:
    """`model`, `method`, `context` and, if any, `options` and `port`; empty when unknown."""
    try:
        value = json.loads(_path().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    found = {key: value[key] for key, kind in _TYPES.items() if isinstance(value.get(key), kind)}
    if found.get("port", _PORTS[0]) not in _PORTS or found.get("port") is True:
        del found["port"]
    return found


def save_last(
    model: str,
    method: str,
    context: int,
    options: dict[str, Any] | None = None,
    port: int | None = None,
) -> None:
    """Remember a start; a folder that cannot be written is not worth an error."""
    record: dict[str, Any] = {"model": model, "method": method, "context": context}
    record |= {"options": options} if options else {}
    text = json.dumps(record | ({"port": port} if port else {}))
    with contextlib.suppress(OSError):
        write_atomically(_path(), text + "\n")
