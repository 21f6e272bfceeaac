"""Small time charts of block characters, with a scale at the left."""

from collections.abc import Callable, Sequence

from textual.content import Content

from veloxquant.panel.theme import GLYPHS


def _buckets(values: Sequence[float], count: int) -> list[float]:
    """The newest values in `count` buckets of equal span; fewer values stay as they are."""
    if len(values) <= count:
        return list(values)
    out = []
    for i in range(count):
        lo, hi = i * len(values) // count, (i + 1) * len(values) // count
        out.append(max(values[lo:hi]))
    return out


def nice_top(value: float) -> float:
    """The next 1, 2, 5 times a power of ten, so that the scale stands still."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    for step in (1, 2, 5, 10):
        if value <= step * power:
            return step * power
    return value


def sparkline(
    values: Sequence[float],
    cells: int,
    rows: int,
    style: str,
    label: Callable[[float], str],
    top: float | None = None,
) -> list[Content]:
    """A bar chart of `rows` lines: scale at the left, the newest value at the right."""
    whole = top or max([*values, 1e-9])
    labels = [label(whole), label(0)]
    margin = max(map(len, labels)) + 1
    room = max(1, cells - margin - 1)
    columns = _buckets(values[-600:], room)
    out = []
    steps = len(GLYPHS.bars) - 1
    for row in range(rows):
        base = rows - 1 - row
        text = []
        for value in columns:
            level = value / whole * rows * steps - base * steps
            text.append(GLYPHS.bars[max(0, min(steps, round(level)))])
            if base == 0 and value > 0 and text[-1] == GLYPHS.bars[0]:
                text[-1] = GLYPHS.bars[1]
        name = labels[0] if row == 0 else labels[1] if row == rows - 1 else ""
        if rows == 1:
            name = labels[0]
        out.append(
            Content.assemble(
                (name.rjust(margin - 1) + " ", "$muted"),
                (GLYPHS.limit, "$rule"),
                (" " * (room - len(columns)) + "".join(text), style),
            )
        )
    return out
