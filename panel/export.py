"""Writing what the panel shows into files for people: log lines, the layer table."""

import csv
import os
import time
from collections.abc import Sequence
from pathlib import Path

from veloxquant.panel.report import without_paths
from veloxquant.panel.state import LogLine
from veloxquant.panel.widgets.clock import wall_clock
from veloxquant.panel.widgets.layers import format_words
from veloxquant.supervisor.messages import LayerRow


def _target(kind: str, suffix: str) -> Path:
    """A new file name in the log folder, which is ours alone."""
    from veloxquant.supervisor import paths

    folder = paths.find().log
    paths.secure_folder(folder)
    return folder / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}.{suffix}"


def _open(path: Path):
    return os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
        "w",
        encoding="utf-8",
        newline="",
    )


def export_lines(lines: Sequence[LogLine]) -> Path:
    """Write log lines, without folders and tokens; returns the file.

    Raises:
        OSError: when the disk is full or the folder cannot be used.
    """
    path = _target("log", "txt")
    with _open(path) as out:
        for line in lines:
            text = without_paths(line.text)
            out.write(
                f"{wall_clock(line.wall, millis=True)} {line.level:<7} {line.source} {text}\n"
            )
    return path


def export_layers(rows: Sequence[LayerRow]) -> Path:
    """Write the layer table as CSV, bytes as integers; returns the file.

    Raises:
        OSError: when the disk is full or the folder cannot be used.
    """
    path = _target("layers", "csv")
    with _open(path) as out:
        writer = csv.writer(out)
        writer.writerow(("layer", "kind", "format", "uncompressed_bytes", "resident_bytes", "rows"))
        writer.writerows(
            (r.index, r.kind, format_words(r), r.fp16, r.resident, r.rows) for r in rows
        )
    return path
