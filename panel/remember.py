"""What the panel remembers between runs: the last start, in one small file of the state folder."""

import json
import os
import tempfile
from pathlib import Path

import msgspec

from veloxquant.supervisor.messages import LaunchSpec

_FILE = "panel.json"


def folder() -> Path:
    """The state folder, made for us alone."""
    from veloxquant.supervisor import paths

    found = paths.find().state
    paths.secure_folder(found)
    return found


def last_spec() -> LaunchSpec | None:
    """The last start that was accepted; None when there is none or it cannot be read."""
    from veloxquant.supervisor.paths import UnsafeFolderError

    try:
        raw = json.loads((folder() / _FILE).read_bytes())
        return msgspec.convert(raw["last"], LaunchSpec)
    except (OSError, ValueError, KeyError, TypeError, UnsafeFolderError, RecursionError):
        return None


def keep_spec(spec: LaunchSpec) -> None:
    """Remember this start; a full disk or a strange folder only means that it is forgotten."""
    from veloxquant.supervisor.paths import UnsafeFolderError

    try:
        target = folder() / _FILE
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".panel-")
        with os.fdopen(handle, "wb") as out:
            out.write(json.dumps({"last": msgspec.to_builtins(spec)}).encode())
        Path(temporary).replace(target)
    except (OSError, UnsafeFolderError):
        return
