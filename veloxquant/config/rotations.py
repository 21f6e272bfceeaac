"""Where fitted rotations of spectral lie, by the name that the configuration gives."""

import re
from pathlib import Path

from veloxquant.config.folders import folders

DEFAULT_NAME = "model"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")


def is_plain_name(name: object) -> bool:
    """Whether the name can be that of a file anywhere."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def rotations_file(name: str) -> Path:
    """The file of the rotations saved under a plain name; it need not exist."""
    return folders().data / "artifacts" / "spectral" / f"{name}.npz"
