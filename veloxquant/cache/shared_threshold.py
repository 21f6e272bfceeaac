"""One threshold of scores for all layers of a sequence, as rows of each layer.

Source: KVzip (arXiv 2505.23416), section 3.3: the best scores of all layers, heads and positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from veloxquant.allocators.layer_budgets import rounded
from veloxquant.cache.layer_board import LayerBoard

SHARES = -1
"""Number of the note with the rows of all layers."""


@dataclass
class Scored:
    """Scores (1, H, n) of one layer's rows after `offset` tokens."""

    offset: int
    scores: mx.array


@dataclass
class Shares:
    """Rows a head, on average, that each layer keeps after `offset` tokens."""

    offset: int
    rows: list[int]


def rows_above(scores: Sequence[mx.array], mean: int) -> list[int]:
    """Rows a head of each layer among the best of all layers, whole numbers of mean `mean`.

    Args:
        scores: (1, H, n) fp32 of each layer, larger is better, all of one shape; rows that stay in
            any case are +inf. NaN counts as worst.
        mean: rows a head that all layers keep on average, at most n.

    Returns:
        One number a layer; equal scores go to earlier layers first.
    """
    flat = [mx.where(mx.isnan(s), -mx.inf, s).reshape(-1) for s in scores]
    heads, total = scores[0].shape[1], mean * scores[0].shape[1] * len(scores)
    everything = mx.concatenate(flat)
    place = everything.size - total
    least = mx.partition(everything, place)[place]
    above: Any = mx.stack([(s > least).sum() for s in flat]).tolist()
    equal: Any = mx.stack([(s == least).sum() for s in flat]).tolist()
    left = total - sum(above)
    counts = []
    for more, same in zip(above, equal, strict=True):
        taken = min(same, left)
        left -= taken
        counts.append(more + taken)
    return rounded([n / heads for n in counts], mean * len(scores))


def post(board: LayerBoard, place: int, offset: int, scores: mx.array) -> None:
    """Tell the other layers the scores of this one's rows."""
    board.notes[place] = Scored(offset, scores)


def own_share(
    board: LayerBoard,
    place: int,
    offset: int,
    mean: int,
    force: Callable[[mx.array], mx.array],
) -> int | None:
    """Rows a head of the layer at `place`; None if a layer posted nothing for these tokens.

    What a layer posted is taken down when it knows its share. `force` gives +inf to scores of rows
    that stay in any case.
    """
    made = board.notes.get(SHARES)
    if not isinstance(made, Shares) or made.offset != offset:
        notes = [board.notes.get(i) for i in range(board.size)]
        told = [n.scores for n in notes if isinstance(n, Scored) and n.offset == offset]
        if len(told) == board.size and len({s.shape for s in told}) == 1:
            made = board.notes[SHARES] = Shares(offset, rows_above([force(s) for s in told], mean))
        else:
            made = None
    board.notes.pop(place, None)
    if place == board.size - 1:
        board.notes.pop(SHARES, None)
    return None if made is None else made.rows[place]
