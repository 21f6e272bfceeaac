"""Write small files so that no reader ever sees half of one; set unreadable ones aside."""

import contextlib
import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path`; on a failure the old content stays.

    Raises:
        OSError: when the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # through a link, so that a linked settings file stays a link
        temporary.replace(path.resolve())
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def set_aside(path: Path) -> Path:
    """Rename an unreadable file to the first free `<name>.corrupt-<n>`; returns the new path."""
    number = 1
    while (target := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    return path.rename(target)
