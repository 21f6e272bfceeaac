"""What layers of one sequence tell each other once: a board of notes.

A list of layers that is copied gets a board of its own. Layers that are copied one by one go on
with the notes made so far, each for itself.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

from veloxquant.cache.coordinators import LayerGroup


class Noting(Protocol):
    """A cache with a board."""

    board: LayerBoard


class LayerBoard:
    """Notes of layers by number; `size` layers read it."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.notes: dict[int, Any] = {}


def joined_board(group: LayerGroup | None) -> tuple[LayerBoard, int]:
    """The board of a group that is being built, and the next member's number in it."""
    if group is None:
        return LayerBoard(), 0
    if not group.members:
        return LayerBoard(group.size), 0
    return cast(Noting, group.members[0]).board, len(group.members)


def join(group: LayerGroup | None, cache: Any) -> None:
    """Let the next layer of the group find this one's board."""
    if group is not None:
        group.join(cache)
