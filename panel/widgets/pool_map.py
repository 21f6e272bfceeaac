"""The block pool as a map: one cell a few blocks, full, part filled or free, coloured by owner."""

from collections.abc import Iterable, Iterator

from textual.content import Content

from veloxquant.panel.state import View
from veloxquant.panel.theme import GLYPHS
from veloxquant.panel.widgets.gauge import flow
from veloxquant.panel.widgets.pane import Pane

_OWNERS = 6
Run = tuple[int, str, int]


def squeeze(runs: Iterable[Run], blocks: int, room: int) -> tuple[int, list[tuple[str, int]]]:
    """Blocks a cell, and the cells (state, owner) that show `blocks` blocks in `room` cells.

    A cell is full only when all its blocks are, free only when all are free.
    """
    per = max(1, -(-blocks // max(1, room)))
    cells: list[tuple[str, int]] = []
    filled, states, owner = 0, set[str](), 0
    for count, state, who in _capped(runs, blocks):
        while count > 0:
            take = min(count, per - filled)
            states.add(state)
            owner = owner or who
            filled += take
            count -= take
            if filled == per:
                cells.append((_state(states), owner))
                filled, states, owner = 0, set(), 0
    if filled:
        cells.append((_state(states), owner))
    return per, cells


def _capped(runs: Iterable[Run], blocks: int) -> Iterator[Run]:
    """The runs, cut or filled up with free blocks to exactly `blocks`."""
    left = blocks
    for count, state, owner in runs:
        take = min(max(0, count), left)
        if take:
            yield take, state if state in "#*" else ".", owner
        left -= take
    if left > 0:
        yield left, ".", 0


def _state(states: set[str]) -> str:
    return next(iter(states)) if len(states) == 1 else "*"


class PoolPane(Pane):
    """Counts, the map, and what a cell means."""

    TITLE = "BLOCK POOL"

    def basis(self, view: View) -> object:
        """The pool alone."""
        return view.stats and view.stats.pool

    def lines(self, view: View, cells: int, rows: int) -> list[Content]:
        """Counts, map in the rows left, legend when there is room."""
        pool = view.stats.pool if view.stats else None
        if pool is None or not pool.blocks:
            return [Content.styled("the pool is empty until the first request", "$muted")]
        facts = [
            f"{pool.blocks:,} blocks x {pool.block_size} tokens",
            f"in use {pool.used:,}",
            f"free {pool.blocks - pool.used:,}",
        ]
        facts += [
            f"{name} {value:,}"
            for name, value in (
                ("part filled", pool.part),
                ("reused", pool.reused),
                ("exhausted", pool.exhausted),
                ("peak", pool.peak),
            )
            if value or name == "exhausted"
        ]
        out = flow([Content(fact) for fact in facts], cells)[: max(1, rows - 2)]
        legend = rows - len(out) >= 3
        height = max(1, rows - len(out) - legend)
        per, squares = squeeze(pool.cells, pool.blocks, cells * height)
        for start in range(0, len(squares), cells):
            out.append(self._line(squares[start : start + cells]))
        if legend:
            each = "one block" if per == 1 else f"{per:,} blocks"
            out.append(
                Content.assemble(
                    (f"one cell = {each}   ", "$muted"),
                    (GLYPHS.full, "$mem-kv"), (" full   ", "$muted"),
                    (GLYPHS.part, "$mem-kv"), (" part filled   ", "$muted"),
                    (GLYPHS.empty, "$faint"), (" free   colour = request", "$muted"),
                )
            )  # fmt: skip
        return out

    @staticmethod
    def _line(squares: list[tuple[str, int]]) -> Content:
        glyph = {"#": GLYPHS.full, "*": GLYPHS.part, ".": GLYPHS.empty}
        parts: list[tuple[str, str]] = []
        for state, owner in squares:
            style = "$faint" if state == "." else f"$owner-{owner % _OWNERS + 1}"
            if parts and parts[-1][1] == style:
                parts[-1] = (parts[-1][0] + glyph[state], style)
            else:
                parts.append((glyph[state], style))
        return Content.assemble(*parts)
