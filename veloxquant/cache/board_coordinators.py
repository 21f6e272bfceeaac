"""Coordinators of layers that tell each other something once, as the documents name them.

A coordinator is made once, and one cache a layer with it, in any order:

    coordinator = SqueezeCoordinator(n_layers=2, avg_budget=512, n_sink=4, strength=1.0)
    layers = [SqueezeAttentionCache(config, i, coordinator) for i in range(2)]

It gives the layers their places at a `LayerBoard`, where they leave notes as those of
`KVCacheBuilder.for_model` do. A layer made again begins another sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import mlx.core as mx

from veloxquant.allocators.layer_budgets import class_budgets
from veloxquant.cache.layer_board import LayerBoard, Seat
from veloxquant.cache.layouts.eviction_prompt import SQUEEZE_ROOM
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import ChunkKVOptions
from veloxquant.config.ranges import is_whole
from veloxquant.core.exceptions import CacheStateError, QuantizerConfigError


def _check_layer(layer_id: int, n_layers: int) -> None:
    if not is_whole(layer_id) or not 0 <= layer_id < n_layers:
        raise ValueError(
            f"layer_id={layer_id!r} is none of the {n_layers} layers, 0 to {n_layers - 1}"
        )


def _check_count(name: str, value: int, least: int) -> None:
    if not is_whole(value) or value < least:
        raise QuantizerConfigError(
            f"{name}={value!r} is not possible; it must be an integer of at least {least}"
        )


# ---- rows by layer ---------------------------------------------------------------------------


@dataclass
class Reported:
    """What one layer says when the prompt of `offset` tokens is complete: scalars.

    By hand there is no prompt: `offset` is None.
    """

    offset: int | None
    concentration: mx.array
    cosine: mx.array | None = None


@dataclass
class Resolved:
    """Rows of all layers after `offset` tokens, and what they come from."""

    offset: int | None
    budgets: list[int]
    values: list[float]
    are_cosines: bool


def agreed(
    board: LayerBoard, offset: int | None, avg_budget: int, least: int, strength: float
) -> Resolved | None:
    """Budgets from what all layers reported; None if one of them did not, or no number."""
    notes = [board.notes.get(i) for i in range(board.size)]
    told = [n for n in notes if isinstance(n, Reported) and n.offset in (None, offset)]
    if len(told) < board.size:
        return None
    values = _numbers([n.cosine for n in told])
    are_cosines = values is not None
    values = values or _numbers([n.concentration for n in told])
    if values is None:
        return None
    budgets = class_budgets(values, avg_budget, least, strength)
    return Resolved(offset, budgets, values, are_cosines)


def _numbers(scalars: Sequence[mx.array | None]) -> list[float] | None:
    """Their values; None if one is missing or not finite, as a stream that overflows makes it."""
    arrays = [a for a in scalars if a is not None]
    if len(arrays) < len(scalars):
        return None
    values: list[float] = mx.stack(arrays).tolist()  # type: ignore[assignment]
    return values if all(math.isfinite(v) for v in values) else None


class SqueezeCoordinator:
    """Rows of every layer from what all of them report.

    Args:
        n_layers: layers that keep rows.
        avg_budget: mean rows of a layer.
        n_sink: first rows that every layer keeps.
        strength: from 0, the same for all, to 1, see `allocators.layer_budgets.class_budgets`.

    Raises:
        QuantizerConfigError: without layers, without room beside the sinks, or for a strength out
            of range.
    """

    def __init__(self, n_layers: int, avg_budget: int, n_sink: int, strength: float) -> None:
        for name, value in (("n_layers", n_layers), ("avg_budget", avg_budget)):
            _check_count(name, value, 1)
        _check_count("n_sink", n_sink, 0)
        if n_sink >= avg_budget:
            raise QuantizerConfigError(
                f"n_sink={n_sink} of avg_budget={avg_budget} rows leaves none to share; n_sink "
                f"must be at least 0 and less than avg_budget"
            )
        if not 0.0 <= strength <= 1.0:
            raise QuantizerConfigError(f"strength={strength} is not possible; it goes from 0 to 1")
        self.n_layers = n_layers
        self.avg_budget = avg_budget
        self.n_sink = n_sink
        self.strength = strength
        self.reset()

    def reset(self) -> None:
        """Forget reports and budgets: caches made from now on belong to another sequence."""
        self.board = LayerBoard(self.n_layers)
        self._seated: set[int] = set()

    @property
    def is_finalized(self) -> bool:
        """Whether all layers reported, and budgets are there."""
        return self.board.outcome is not None

    def report_concentration(self, layer_id: int, concentration: float) -> None:
        """Report for a layer that has no cache of this coordinator; the last report decides.

        Raises:
            ValueError: for an unknown layer, or no finite number.
            CacheStateError: when budgets are decided, or the layer's cache reports itself.
        """
        _check_layer(layer_id, self.n_layers)
        if not math.isfinite(concentration):
            raise ValueError(f"concentration={concentration} of layer {layer_id} is not finite")
        if self.is_finalized:
            raise CacheStateError(
                "the budgets are decided; call reset() before reporting for another sequence"
            )
        if layer_id in self._seated:
            raise CacheStateError(f"layer {layer_id} has a cache, which reports by itself")
        board = self.board
        board.notes[layer_id] = Reported(None, mx.array(concentration))
        least = min(self.n_sink + SQUEEZE_ROOM, self.avg_budget)
        board.outcome = agreed(board, None, self.avg_budget, least, self.strength)

    def resolved_budget(self, layer_id: int) -> int | None:
        """Rows of a layer; None until all layers reported.

        Raises:
            ValueError: for an unknown layer.
        """
        _check_layer(layer_id, self.n_layers)
        made = self.board.outcome
        return made.budgets[layer_id] if isinstance(made, Resolved) else None

    def seat(self, config: KVCacheConfig, layer_id: int | None) -> tuple[KVCacheConfig, Seat]:
        """Settings and place of a layer's cache; budget, sinks and strength are the coordinator's.

        Raises:
            ValueError: for an unknown layer.
        """
        place = _told(layer_id, self.n_layers)
        if place in self._seated:
            self.reset()
        self._seated.add(place)
        config = config.with_fields(
            squeeze_budget=self.avg_budget,
            squeeze_n_sink=self.n_sink,
            squeeze_strength=self.strength,
        )
        return config, Seat(self.board, place)


def _told(layer_id: int | None, n_layers: int) -> int:
    """The number of a layer.

    Raises:
        ValueError: when it was not told, or is none of the layers.
    """
    if layer_id is None:
        raise ValueError(f"a layer of a coordinator needs its layer_id, 0 to {n_layers - 1}")
    _check_layer(layer_id, n_layers)
    return layer_id


# ---- indices of kept rows --------------------------------------------------------------------


class ChunkKVIndexReuseCoordinator:
    """Layers of a block take over the rows that its first one keeps.

    Caches hand over index arrays at a board of their block. `publish` and `fetch` are for whoever
    runs the functions of `quantizers.chunkkv`: lists of positions, which stay until replaced.

    Args:
        n_layers: layers of the model.
        reuse_layers: layers of a block; 1 lets every layer choose for itself.

    Raises:
        QuantizerConfigError: when one of both is less than 1.
    """

    def __init__(self, n_layers: int, reuse_layers: int) -> None:
        for name, value in (("n_layers", n_layers), ("reuse_layers", reuse_layers)):
            _check_count(name, value, 1)
        self.n_layers = n_layers
        self.reuse_layers = reuse_layers
        self._kept: dict[tuple[int, int], list[list[int]]] = {}
        self._boards: dict[int, tuple[LayerBoard, set[int]]] = {}
        self._settings: dict[int, KVCacheConfig] = {}

    def leader_for(self, layer_id: int) -> int:
        """The layer whose choice a layer takes over, its own number if it chooses itself.

        Raises:
            ValueError: for an unknown layer.
        """
        _check_layer(layer_id, self.n_layers)
        return layer_id - layer_id % self.reuse_layers

    def is_leader(self, layer_id: int) -> bool:
        """Whether a layer chooses itself."""
        return self.leader_for(layer_id) == layer_id

    def publish(self, layer_id: int, head_idx: int, kept_positions: list[list[int]]) -> None:
        """Hand over what the first layer of a block keeps for one head, in place of what it kept.

        Raises:
            ValueError: for an unknown layer, or one that takes over another one's choice.
        """
        leader = self.leader_for(layer_id)
        if leader != layer_id:
            raise ValueError(
                f"layer {layer_id} takes over the choice of layer {leader}; only that one publishes"
            )
        self._kept[layer_id, head_idx] = kept_positions

    def fetch(self, layer_id: int, head_idx: int) -> list[list[int]] | None:
        """What the first layer of this one's block published for a head; None before it did."""
        return self._kept.get((self.leader_for(layer_id), head_idx))

    def seat(self, config: KVCacheConfig, layer_id: int | None) -> Seat:
        """Place of a layer's cache in its block.

        Raises:
            ValueError: for an unknown layer.
            QuantizerConfigError: when the block's layers have other settings.
        """
        place = _told(layer_id, self.n_layers)
        leader = self.leader_for(place)
        board, seated = self._boards.get(leader, (None, set[int]()))
        if board is None or place in seated:
            board, seated = LayerBoard(min(self.reuse_layers, self.n_layers - leader)), set()
            self._boards[leader] = board, seated
            self._settings[leader] = config
        first = self._settings[leader]
        for name in ("eviction_storage", *(f.name for f in fields(ChunkKVOptions))):
            if (own := getattr(config, name)) != (theirs := getattr(first, name)):
                raise QuantizerConfigError(
                    f"{name}={own!r} of layer {place}: it takes over the rows of layer {leader}, "
                    f"which were chosen with {name}={theirs!r}; give a block's layers the same"
                )
        seated.add(place)
        return Seat(board, place - leader)
