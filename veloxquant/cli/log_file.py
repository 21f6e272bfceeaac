"""`vq logs` after the supervisor has gone: the newest lines of the file that it wrote."""

import re
from pathlib import Path
from typing import Any

MOST_BYTES = 4 << 20
"""End of the file that is read."""
_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) "
    r"(?P<level>DEBUG|INFO|WARNING|ERROR) +(?P<source>\S+) +(?P<text>.*)"
)


def last_lines(path: Path, last: int, levels: tuple[str, ...], grep: str) -> list[dict[str, Any]]:
    """The newest lines of these levels that hold `grep`, oldest first; none without a file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    found = (match for line in text.splitlines() if (match := _LINE.fullmatch(line)))
    records = [match.groupdict() | {"level": match["level"].lower()} for match in found]
    wanted = [
        record
        for record in records
        if record["level"] in levels and grep.lower() in record["text"].lower()
    ]
    return wanted[-last:]
