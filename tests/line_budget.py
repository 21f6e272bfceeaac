"""Fail when a source file outgrows its room; print lines a folder.

`python -P tests/line_budget.py`. Two files of plain declarations may be longer.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

LIMIT = 400
ALLOWED = {
    "veloxquant/config/options.py": 460,
    "supervisor/messages.py": 480,
}
FOLDERS = ("panel", "supervisor", "worker", "kernels", "veloxquant")


def main() -> int:
    """Count, print, and return 1 when a file is over its limit."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        capture_output=True,
        text=True,
        check=True,
    )
    totals: Counter[str] = Counter()
    over: list[str] = []
    for name in listed.stdout.split():
        path = Path(name)
        if path.suffix != ".py" or not path.is_file():
            continue
        lines = len(path.read_text(encoding="utf-8").splitlines())
        totals["/".join(path.parts[:2]) if path.parts[0] == "veloxquant" else path.parts[0]] += (
            lines
        )
        if lines > ALLOWED.get(name, LIMIT):
            over.append(f"{name}: {lines} lines, limit {ALLOWED.get(name, LIMIT)}")
    for folder, lines in sorted(totals.items()):
        print(f"{lines:7,}  {folder}")
    print(f"{sum(totals.values()):7,}  in all")
    print("\n".join(over), file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
