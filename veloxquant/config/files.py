"""Write small files so that no reader ever sees half of one; set unreadable ones aside."""

from pathlib import Path

from veloxquant.core.whole_files import write_file


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path`, for this user alone; on a failure the old content stays.

    Raises:
        OSError: when the folder cannot be made or written.
    """
    # through a link, so that a linked settings file stays a link
    write_file(path.resolve(), text.encode(), mode=0o600)


def set_aside(path: Path) -> Path:
    """Rename an unreadable file to the first free `<name>.corrupt-<n>`; returns the new path."""
    number = 1
    while (target := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    return path.rename(target)
