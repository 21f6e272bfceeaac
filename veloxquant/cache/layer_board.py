"""What layers of one sequence tell each other once: a board of notes.

A list of layers that is copied gets a board of its own. Layers that are copied one by one go on
with the notes made so far, each for itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

from veloxquant.cache.context import LayerContext
from veloxquant.cache.coordinators import LayerGroup


class Noting(Protocol):
    """A cache with a board."""

    board: LayerBoard


class LayerBoard:
    """Notes of layers by number; `size` layers read it. `outcome` is what they last agreed on."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.notes: dict[int, Any] = {}
        self.outcome: Any = None


class Seat(NamedTuple):
    """A board and a layer's number at it."""

    board: LayerBoard
    place: int


def seat_of(context: LayerContext) -> Seat:
    """The board of a layer that is being built, and its number there."""
    return context.seat or joined_board(context.group)


def joined_board(group: LayerGroup | None) -> Seat:
    """The board of a group that is being built, and the next member's number at it."""
    if group is None:
        return Seat(LayerBoard(), 0)
    if not group.members:
        return Seat(LayerBoard(group.size), 0)
    return Seat(cast(Noting, group.members[0]).board, len(group.members))


def join(group: LayerGroup | None, cache: Any) -> None:
    """Let the next layer of the group find this one's board."""
    if group is not None:
        group.join(cache)
