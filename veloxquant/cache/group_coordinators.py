"""Coordinators of layers that code their tokens together, as the documents name them.

A coordinator is made once, and one cache a layer with it, in layer order:

    coordinator = XQuantCoordinator()
    first = XQuantKVCache(config, "anchor", 0, coordinator)
    second = XQuantKVCache(config, "reuse", 0, coordinator)

It finds the `LayerGroup` of every group number; the layers of a group then share as those of
`KVCacheBuilder.for_model` do, and hold all there is to hold. The first layer of a group, made
again, begins another sequence under that number.
The other methods hand over segments by hand, for the functions of `quantizers.xquant`, `.minicache`
and `.xkv`. What waits there for its readers is counted by `nbytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx

from veloxquant.cache.context import LayerContext
from veloxquant.cache.coordinators import LayerGroup
from veloxquant.cache.layouts.latent import PLANS
from veloxquant.cache.segments import Segments
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.ranges import is_whole
from veloxquant.core.exceptions import CacheStateError, QuantizerConfigError
from veloxquant.quantizers.xkv import joint_svd_compress
from veloxquant.quantizers.xquant import GroupParams

T = TypeVar("T")
Basis = tuple[mx.array, mx.array, mx.array]
DEFAULT_MAX_CTX = 8192


class CodeSegment(NamedTuple):
    """Codes of a layer, and the scales it reads them with itself."""

    token_start: int
    n_tokens: int
    codes: mx.array
    params: GroupParams


class RowSegment(NamedTuple):
    """Keys and values (..., n_tokens, D) of a layer."""

    token_start: int
    n_tokens: int
    keys: mx.array
    values: mx.array


class GroupCoordinator(Generic[T]):
    """Groups of layers by number, and segments that are handed over by hand.

    Args:
        max_ctx: tokens that a group of segments may reach.

    Raises:
        QuantizerConfigError: for less than one token.
    """

    def __init__(self, max_ctx: int = DEFAULT_MAX_CTX) -> None:
        self._segments: Segments[T] = Segments(max_ctx)
        self._groups: dict[int, tuple[LayerGroup, Any]] = {}

    @property
    def max_ctx(self) -> int:
        """Tokens that segments of a group may reach."""
        return self._segments.max_ctx

    @property
    def nbytes(self) -> int:
        """Bytes of segments that wait to be read; caches count what they share themselves."""
        return self._segments.nbytes

    def reset(self) -> None:
        """Forget segments and groups: caches made from now on belong to another sequence."""
        self._segments.clear()
        self._groups.clear()

    def published_tokens(self, group_id: int) -> int:
        """Tokens of a group that were handed over, or that its caches have coded together."""
        coded = 0
        if group_id in self._groups and (members := self._groups[group_id][0].members):
            coded = members[0].sides()[0].body.length
        return max(coded, self._segments.end(group_id))

    # ---- groups of caches ---------------------------------------------------------------

    def begin(self, config: KVCacheConfig, group_id: int, size: int) -> LayerGroup:
        """A group of `size` layers of a new sequence, for its first layer.

        Raises:
            QuantizerConfigError: for less than one layer.
        """
        if not is_whole(size) or size < 1:
            raise QuantizerConfigError(f"a group of {size!r} layers; it has at least the first one")
        group = LayerGroup(size, group_id)
        self._groups[group_id] = group, _shared_settings(config, size)
        return group

    def joined(
        self,
        config: KVCacheConfig,
        group_id: int,
        place: int | None = None,
        size: int | None = None,
    ) -> LayerGroup:
        """The group of a layer after the first, number `place` of `size` where those are known.

        Raises:
            QuantizerConfigError: when the group has no first layer or no room, when a layer before
                this one is missing, or when settings differ.
        """
        group, settings = self._groups.get(group_id, (None, None))
        if group is None or not len(group.members) == group.made > 0:
            raise QuantizerConfigError(
                f"group {group_id} has no first layer, or lost one; make the caches of a group in "
                f"layer order, with one coordinator, and keep them"
            )
        there = group.made
        if there >= group.size:
            raise QuantizerConfigError(
                f"group {group_id} has all of its {group.size} layers; tell the first one how many "
                f"there are, or take another group_id"
            )
        if place not in (None, there) or size not in (None, group.size):
            raise QuantizerConfigError(
                f"layer {place} of {size} cannot be the next one of group {group_id}, which has "
                f"{there} of its {group.size} layers; make them in order, all with one size"
            )
        if _shared_settings(config, group.size) != settings:
            raise QuantizerConfigError(
                f"layers of group {group_id} read one another's codes, and this one's settings or "
                f"head size differ from the first one's; give them one configuration"
            )
        return group


def _shared_settings(config: KVCacheConfig, size: int) -> Any:
    return PLANS[config.method](config, 0, size), config.head_dim


def by_role(
    config: KVCacheConfig,
    roles: tuple[str, str],
    role: str,
    group_id: int,
    coordinator: GroupCoordinator[Any] | None,
    n_readers: int,
) -> LayerContext:
    """The place of a layer that is the first of its group (`roles[0]`) or reads it (`roles[1]`).

    Raises:
        QuantizerConfigError: for another role, or a reader without anything to read.
    """
    if role not in roles:
        raise QuantizerConfigError(f"role={role!r} is not possible; it is one of {roles}")
    group = None
    if coordinator is not None:
        is_first = role == roles[0]
        group = (
            coordinator.begin(config, group_id, 1 + n_readers)
            if is_first
            else coordinator.joined(config, group_id)
        )
    elif role != roles[0]:
        raise QuantizerConfigError(
            f"role={role!r} reads what the {roles[0]!r} layer of its group holds; give both the "
            f"same coordinator"
        )
    return LayerContext(seed=config.seed, group=group)


class XQuantCoordinator(GroupCoordinator[CodeSegment]):
    """Layers that read the codes of one of them."""

    def register_anchor(
        self,
        group_id: int,
        token_start: int,
        n_tokens: int,
        codes: mx.array,
        params: GroupParams,
        n_readers: int = 1,
    ) -> None:
        """Hand over codes, see `quantizers.xquant.quantize_codes`, for `n_readers` layers.

        Raises:
            QuantizerConfigError: when they end beyond `max_ctx`.
            ValueError: for no tokens, or a negative place or number of readers.
        """
        item = CodeSegment(token_start, n_tokens, codes, params)
        nbytes = codes.nbytes + params.scale.nbytes + params.zero.nbytes
        self._segments.put(group_id, token_start, n_tokens, item, nbytes, n_readers)

    def fetch_anchor(self, group_id: int, token_start: int) -> CodeSegment | None:
        """Codes that start at a token; None when none do, or all readers had them."""
        return self._segments.take(group_id, token_start)


class MiniCacheCoordinator(GroupCoordinator[RowSegment]):
    """Layers that share directions with another one."""

    def publish_primary(
        self,
        group_id: int,
        token_start: int,
        n_tokens: int,
        keys: mx.array,
        values: mx.array,
        n_readers: int = 1,
    ) -> None:
        """Hand over keys and values (..., n_tokens, D) for `n_readers` layers.

        Raises:
            QuantizerConfigError: when they end beyond `max_ctx`.
            ValueError: for no tokens, or a negative place or number of readers.
        """
        item = RowSegment(token_start, n_tokens, keys, values)
        nbytes = keys.nbytes + values.nbytes
        self._segments.put(group_id, token_start, n_tokens, item, nbytes, n_readers)

    def fetch_primary(self, group_id: int, token_start: int) -> RowSegment | None:
        """Rows that start at a token; None when none do, or all readers had them."""
        return self._segments.take(group_id, token_start)


@dataclass
class _Gathered:
    """Keys of layers until all are there, then a basis in their place and how it was asked for."""

    keys: dict[int, mx.array] = field(default_factory=dict)
    basis: Basis | None = None
    asked: tuple[int, int | None, float] | None = None


class XKVCoordinator(GroupCoordinator[Any]):
    """Layers that share a basis."""

    def __init__(self, max_ctx: int = DEFAULT_MAX_CTX) -> None:
        super().__init__(max_ctx)
        self._gathered: dict[tuple[int, int], _Gathered] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of keys that wait for other layers', and of bases."""
        held = (a for g in self._gathered.values() for a in (*g.keys.values(), *(g.basis or ())))
        return sum(a.nbytes for a in held)

    def reset(self) -> None:
        """Forget keys, bases and groups: caches made from now on belong to another sequence."""
        super().reset()
        self._gathered.clear()

    def publish_member_keys(
        self, group_id: int, member_idx: int, token_start: int, n_tokens: int, keys: mx.array
    ) -> None:
        """Hand over keys (..., D) of one layer; a segment that has its basis begins anew.

        Raises:
            QuantizerConfigError: when they end beyond `max_ctx`.
            ValueError: for no tokens or a negative place.
        """
        self._segments.reach(group_id, token_start, n_tokens)
        gathered = self._gathered.setdefault((group_id, token_start), _Gathered())
        if gathered.basis is not None:
            gathered = self._gathered[group_id, token_start] = _Gathered()
        gathered.keys[member_idx] = keys

    def get_shared_basis(
        self,
        group_id: int,
        token_start: int,
        expected_members: int,
        rank: int | None = None,
        energy_threshold: float = 0.95,
    ) -> Basis | None:
        """Directions (D, r), mean (D,) and singular values (r,) of the keys of all layers.

        None until `expected_members` layers handed theirs over. They go once the basis is there,
        which is the same for every layer that asks.

        Raises:
            CacheStateError: when the basis of a segment is asked for in another way than before.
        """
        gathered = self._gathered.get((group_id, token_start))
        if gathered is None:
            return None
        asked = (expected_members, rank, energy_threshold)
        if gathered.basis is None:
            if len(gathered.keys) < expected_members:
                return None
            order = sorted(gathered.keys)
            stack = [k.reshape(-1, k.shape[-1]) for k in map(gathered.keys.__getitem__, order)]
            gathered.basis = joint_svd_compress(stack, rank, energy_threshold)
            mx.eval(*gathered.basis)
            gathered.asked = asked
            gathered.keys.clear()
        elif gathered.asked != asked:
            raise CacheStateError(
                f"the basis of group {group_id} at token {token_start} was made for (layers, rank, "
                f"energy) = {gathered.asked}, and {asked} is asked for; its keys are gone, publish "
                f"them again"
            )
        return gathered.basis
