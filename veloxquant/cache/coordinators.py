"""Layers of one sequence that code their tokens together.

Layers run one after the other, so the rows of a token are complete only when the last layer of the
group has them. Until then every layer keeps its own rows exact; `publish` codes what all of them
have. A group belongs to one sequence: every sequence of a batch has its own, and copies of a
sequence get a new one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import mlx.core as mx

from veloxquant.cache.sharing import SharingStream
from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.together import TogetherCodec

Split = Callable[[int], Sequence[Sequence[int]]]
_ENCODING = ("dims", "traditional", "base", "scale")


class Member(Protocol):
    """A layer's cache, as far as its group knows it."""

    offset: int
    group: LayerGroup
    _unevaluated: list[mx.array]
    _shape: tuple[int, int, int, int] | None

    def sides(self) -> tuple[SharingStream, SharingStream]:
        """Streams of keys and of values."""
        ...

    def commit(self) -> None:
        """Take pending tokens into the streams."""
        ...

    def rewind(self, n: int) -> int:
        """Drop the newest `n` committed tokens of this layer alone."""
        ...

    def take_role(self, group: LayerGroup, index: int) -> None:
        """Become an empty member of another group."""
        ...

    def copied(self, memo: dict[int, Any]) -> Member:
        """A copy of this layer in the group that `memo` has for this one."""
        ...

    def arrays(self) -> Any:
        """Every array held."""
        ...


class LayerGroup:
    """`size` layers of one sequence; they join in layer order, and the first one owns the codes.

    `number` is that of the group in its model.
    Members are referred to weakly: layers know their group, and memory of a sequence that ended
    must go at once, not when Python next looks for cycles. `epoch` counts changes of any layer:
    copies of single layers that were made within one epoch belong together.
    """

    def __init__(self, size: int = 1, number: int = 0) -> None:
        self.size = size
        self.number = number
        self._members: list[weakref.ref[Member]] = []
        self._unclaimed: dict[int, Member] = {}
        self.epoch = 0
        self._rewound: dict[int, int] = {}
        self._twins: list[tuple[weakref.ref[LayerGroup], set[int]]] = []

    def join(self, member: Member) -> int:
        """Number of a new member."""
        assert len(self._members) < self.size, "the group is complete"
        self._members.append(weakref.ref(member))
        return len(self._members) - 1

    @property
    def members(self) -> list[Member]:
        """The layers that are there, in layer order."""
        return [m for ref in self._members if (m := ref()) is not None]

    @property
    def made(self) -> int:
        """Layers that joined, those that are gone included."""
        return len(self._members)

    def _place(self, member: Member) -> int:
        return next(i for i, ref in enumerate(self._members) if ref() is member)

    def _changed(self) -> None:
        self.epoch += 1
        self._twins.clear()
        self._unclaimed.clear()

    # ---- coding -------------------------------------------------------------------------

    def ready(self, side: int) -> int:
        """Waiting tokens of keys (0) or values (1) that all layers have and the schedule wants."""
        streams = [m.sides()[side] for m in self.members]
        if len(streams) < self.size:
            return 0
        first = streams[0]
        tokens = min(s.body.length + s.window.length for s in streams)
        return first.plan.schedule.frontier(tokens) - first.body.length

    def publish(self) -> None:
        """Code what is ready; called when a layer took new rows.

        Raises:
            CacheStateError: when layers hold rows of different shapes.
        """
        self._changed()
        known = [m._shape for m in self.members if m._shape is not None]
        if other := [shape for shape in known if shape != known[0]]:
            raise CacheStateError(
                f"layers that share codes hold rows (batch, heads, key and value size) of one "
                f"shape; these hold {known[0]} and {other[0]}"
            )
        done = False
        for side in (0, 1):
            if (n := self.ready(side)) > 0:
                self._code([m.sides()[side] for m in self.members], n)
                done = True
        if done:
            for member in self.members:
                member._unevaluated = list(member.arrays())

    @staticmethod
    def _code(streams: Sequence[SharingStream], n: int) -> None:
        codec = cast(TogetherCodec, streams[0].body.codec)
        rows = [s.waiting(n) for s in streams]
        count = codec.spec.fit_tokens
        if count and not streams[0].body.fitted:
            fitted = codec.fit_together([x[:, :, :count] for x in rows])
            for stream, constants in zip(streams, fitted, strict=True):
                stream.body.set_fitted(constants)
        packed = codec.encode_together(rows, [s.body.fitted for s in streams])
        for stream, own in zip(streams, packed, strict=True):
            stream.take_coded(own, n)

    def settle(self) -> None:
        """Commit every layer, so that what all of them have is coded."""
        for member in self.members:
            member.commit()

    def rewind(self, member: Member, n: int) -> int:
        """Drop the newest `n` tokens of every layer when the first of them is told to.

        Layers that read the first one's codes go back before it does. The others, told the same
        afterwards, have nothing left to do.

        Raises:
            CacheStateError: when layers of the group are told different numbers.
        """
        place = self._place(member)
        if (done := self._rewound.pop(place, None)) is not None:
            if done != n:
                raise CacheStateError(
                    f"layers of a group share codes; one was rewound by {done} tokens and this one "
                    f"by {n}; rewind all layers alike"
                )
            return n
        if n == 0:
            return 0
        self._changed()
        for one in reversed(self.members):
            one.rewind(min(n, one.offset))
        self._rewound = {i: n for i in range(len(self._members)) if i != place}
        return n

    def rewound(self, member: Member) -> int:
        """Tokens by which this layer went back together with another one, not being told yet."""
        return self._rewound.get(self._place(member), 0)

    def forget_rewound(self, member: Member) -> None:
        """The layer goes on: what others were told no longer concerns it."""
        self._rewound.pop(self._place(member), None)

    def reset(self) -> None:
        """Make every member a group of one; all but one of them must be empty.

        Raises:
            CacheStateError: when two members hold tokens, which they share.
        """
        if sum(m.offset > 0 for m in self.members) > 1:
            raise CacheStateError("layers that share codes cannot be parted while they hold tokens")
        members, self._members = self.members, []
        for member in members:
            member.take_role(LayerGroup(number=self.number), 0)

    # ---- copies -------------------------------------------------------------------------

    def copied(self, memo: dict[int, Any]) -> LayerGroup:
        """A group of copies of all members, noted in `memo`."""
        twin = LayerGroup(self.size, self.number)
        memo[id(self)] = twin
        twin._rewound = dict(self._rewound)
        # The memo keeps the copies alive until whoever asked has them.
        twin._members = [weakref.ref(m.copied(memo)) for m in self.members]
        return twin

    def twin_of(self, member: Member) -> Member:
        """A copy of one member alone; copies of the others, asked for next, join its group."""
        place = self._place(member)
        for ref, taken in self._twins:
            group = ref()
            if group is not None and group.epoch == 0 and place not in taken:
                taken.add(place)
                return group._unclaimed.pop(place)
        memo: dict[int, Any] = {}
        group = self.copied(memo)
        group._unclaimed = dict(enumerate(group.members))
        self._twins.append((weakref.ref(group), {place}))
        return group._unclaimed.pop(place)


def groups_for(
    split: Split, shapes: Sequence[LayerShape], ropes: Sequence[Any | None]
) -> list[LayerGroup]:
    """The group of every layer: as `split` says for this number of layers, if they are alike.

    Layers of different shapes or position encodings stay alone.
    """
    out: list[LayerGroup | None] = [None] * len(shapes)
    for number, layers in enumerate(split(len(shapes))):
        alike = all(
            shapes[i] == shapes[layers[0]] and same_encoding(ropes[i], ropes[layers[0]])
            for i in layers
        )
        shared = LayerGroup(len(layers), number) if alike else None
        for i in layers:
            out[i] = shared or LayerGroup(number=number)
    return [group or LayerGroup() for group in out]


def same_encoding(a: Any | None, b: Any | None) -> bool:
    """Whether two layers turn keys alike."""
    if a is None or b is None:
        return a is b
    same = (getattr(a, name, None) == getattr(b, name, None) for name in _ENCODING)
    return type(a) is type(b) and all(same)
