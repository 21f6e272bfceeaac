"""Caches of layers that code their tokens together with other layers of their sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import mlx.core as mx

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.coordinators import LayerGroup
from veloxquant.cache.layer import LayerCache
from veloxquant.cache.plans import LayerPlan
from veloxquant.cache.sharing import SharingStream
from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.sizes import LayerShape

Layout = Callable[[int, int], tuple[LayerPlan, tuple[Codec | None, Codec | None]]]


class GroupedCache(ComposedCache):
    """One layer of a group; by itself it is a group of one.

    `layout` gives plan and codecs of member `index` of `size`.
    """

    stream_type = SharingStream
    constants: ClassVar[frozenset[str]] = frozenset({"layout_of"})
    keys_stream: SharingStream
    values_stream: SharingStream

    def __init__(
        self, layout: Layout, shape: LayerShape, method: str, group: LayerGroup | None
    ) -> None:
        self.layout_of = (layout, shape)
        self.group = group or LayerGroup()
        self.index = self.group.join(self)
        plan, codecs = layout(self.index, self.group.size)
        super().__init__(plan, shape, method, codecs)
        self._borrow()

    def _borrow(self) -> None:
        if self.index and self.keys_stream.is_together:
            for own, first in zip(self.sides(), self.group.members[0].sides(), strict=True):
                own.body.lender = first.body

    def take_role(self, group: LayerGroup, index: int) -> None:
        """Become an empty member of another group."""
        layout, shape = self.layout_of
        self.group = group
        self.index = group.join(self)
        assert self.index == index
        self.plan, codecs = layout(index, group.size)
        self.keys_stream = SharingStream(self.plan.keys, shape.k_dim, codecs[0])
        self.values_stream = SharingStream(self.plan.values, shape.v_dim, codecs[1])
        self.offset, self.pending = 0, None
        self._borrow()

    def sides(self) -> tuple[SharingStream, SharingStream]:
        """Streams of keys and of values."""
        return self.keys_stream, self.values_stream

    # ---- documented counters ------------------------------------------------------------

    @property
    def group_id(self) -> int:
        """Number of the group in its model, or under its coordinator."""
        return self.group.number

    @property
    def role(self) -> str:
        """Which part it plays: "primary" owns what the group shares, a "reader" reads it there."""
        return "reader" if self.index else "primary"

    # ---- protocol -----------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Add (B, H, L, D) and return everything to attend to, as views or as arrays."""
        self.group.forget_rewound(self)
        if self.index == 0:
            # The step before is over for every layer: what all have is coded now, whether or not
            # somebody looked at the state in between.
            self.group.settle()
        return super().update_and_fetch(keys, values)

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Append to both streams and let the group code what all its layers have."""
        super().write(keys, values)
        if self.keys_stream.is_together:
            self.group.publish()

    def trim(self, n: int) -> int:
        """Rewind the newest `n` tokens of the whole group; returns how many were rewound.

        Raises:
            CacheStateError: when another layer of the group was rewound by another number.
        """
        self.group.settle()
        most = self.offset + self.group.rewound(self)
        return self.group.rewind(self, max(0, min(n, most)))

    def rewind(self, n: int) -> int:
        """Drop the newest `n` tokens of this layer alone."""
        return super().trim(n)

    def extra_state(self) -> list[Any]:
        """Place in the group."""
        return [self.index, self.group.size]

    @property
    def state(self) -> list[Any]:
        """Packed arrays and counters of this layer; the whole group commits first."""
        self.group.settle()
        return super().state

    @state.setter
    def state(self, saved: list[Any]) -> None:
        """Take over a state of the same method, layout and place in a group.

        Raises:
            CacheStateError: when it was written by another version, method, layout or place.
        """
        place = saved[-1] if isinstance(saved, list | tuple) and len(saved) else None
        if place == [0, 1] and self.group.size > 1:
            self.offset = 0
            self.group.reset()
        elif place != self.extra_state():
            raise CacheStateError(
                f"state of layer {place} of its group given to layer {self.extra_state()}"
            )
        cast(Any, LayerCache.state).fset(self, saved)

    def compact_state(self) -> list[Any]:
        """As `state`, with buffers cut to the tokens held: what goes into a file."""
        self.group.settle()
        return super().compact_state()

    # ---- copies -------------------------------------------------------------------------

    def copied(self, memo: dict[int, Any]) -> GroupedCache:
        """A copy of this layer in the group that `memo` has for this one."""
        return cast(GroupedCache, LayerCache.__deepcopy__(self, memo))

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupedCache:
        """An independent copy; copies of the other layers belong to it.

        A list of layers is copied with its groups. Layers that are copied one by one, as batches
        do, find each other again.
        """
        if not memo and self.group.size > 1:
            return cast(GroupedCache, self.group.twin_of(self))
        if id(self.group) not in memo:
            self.group.copied(memo)
        return memo[id(self)]
