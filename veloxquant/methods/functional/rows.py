"""What the functions of all evicting methods share: rows of heads, absorbing, picking, counting."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from veloxquant.cache.evicting import POSITIONS, Policy
from veloxquant.cache.scorers import Scorer
from veloxquant.cache.selection import select_rows
from veloxquant.core.exceptions import QuantizerConfigError

HALF_BYTES = 2


@dataclass
class HeadState:
    """Rows of one head, (n, D) each, and how many stay."""

    keys: mx.array | None = None
    values: mx.array | None = None
    n_sink: int = 0
    budget: int = 0
    head_dim: int = field(default=0, kw_only=True)


def check_budget(n_sink: int, budget: int) -> None:
    """Raise unless sinks leave room.

    Raises:
        QuantizerConfigError: when they do not.
    """
    if not 0 <= n_sink < budget:
        raise QuantizerConfigError(
            f"n_sink={n_sink} of budget={budget} rows leaves none to choose; "
            f"n_sink must be at least 0 and less than budget"
        )


class HeadRows:
    """Rows (N, n, D) of N heads as scorers see a cache: one sequence of N heads."""

    def __init__(
        self, keys: mx.array, values: mx.array, columns: dict[str, mx.array] | None = None
    ) -> None:
        self._keys, self._values = keys[None], values[None]
        self.columns = {name: column[None] for name, column in (columns or {}).items()}
        self.index: mx.array | None = None

    @property
    def rows(self) -> int:
        """Rows held."""
        return self._keys.shape[2]

    def keys(self, stop: int | None = None) -> mx.array:
        """Keys of the first `stop` rows, (1, N, n, D)."""
        return self._keys[:, :, :stop]

    def values(self, stop: int | None = None) -> mx.array:
        """Values of the first `stop` rows."""
        return self._values[:, :, :stop]

    def column(self, name: str) -> mx.array:
        """A column of every head, (N, n)."""
        return self.columns[name][0]

    def pick(self, keep: mx.array) -> None:
        """Keep the rows at `keep` (1, N or 1, m); `index` says which ones."""
        keep = mx.broadcast_to(keep, (*self._keys.shape[:2], keep.shape[-1]))
        self.index = keep[0]
        self._keys = mx.take_along_axis(self._keys, keep[..., None], axis=2)
        self._values = mx.take_along_axis(self._values, keep[..., None], axis=2)
        self.columns = {
            name: mx.take_along_axis(column, keep, axis=-1) for name, column in self.columns.items()
        }

    def pair(self) -> tuple[mx.array, mx.array]:
        """Keys and values (N, n, D)."""
        return self._keys[0], self._values[0]


def extended(
    old: tuple[mx.array | None, mx.array | None],
    new: tuple[mx.array, mx.array],
    columns: dict[str, mx.array | None],
    start: int,
) -> HeadRows:
    """Old rows (N, n, D), None for none, with new ones (N, S, D) at positions from `start` on.

    Columns still lack the new rows' entries, except for positions.
    """
    count = new[0].shape[1]
    places = mx.broadcast_to(
        mx.arange(start, start + count, dtype=mx.int32), (new[0].shape[0], count)
    )
    keys, values = (
        b if a is None else mx.concatenate([a, b], axis=1) for a, b in zip(old, new, strict=True)
    )
    held = HeadRows(keys, values, {n: c for n, c in columns.items() if c is not None})
    before = columns.get(POSITIONS)
    placed = places if before is None else mx.concatenate([before, places], axis=-1)
    held.columns[POSITIONS] = placed[None]
    return held


def absorb(held: HeadRows, new_keys: mx.array, scorer: Scorer, policy: Policy) -> mx.array | None:
    """Score with keys as queries and pick; returns what was kept (1, N or 1, m), None if all."""
    fresh = new_keys[None]
    scorer.append(held, fresh)
    if scorer.needs != "none":
        scorer.observe(held, fresh, new_keys.shape[-1] ** -0.5)
    scores = scorer.score(held)
    if held.rows <= policy.budget:
        return None
    sinks = min(policy.n_sink, policy.budget)
    recent = min(policy.n_recent, policy.budget - sinks)
    return select_rows(scores, policy.budget, sinks, recent, later_wins=policy.later_wins)


def lift(*arrays: mx.array | None) -> list[mx.array | None]:
    """Arrays of one head as those of a list of one."""
    return [None if a is None else a[None] for a in arrays]


def get_kv(state: Any) -> tuple[mx.array, mx.array]:
    """Keys and values held, (n, D); no rows before the first update."""
    if state.keys is None or state.values is None:
        none = mx.zeros((0, state.head_dim), dtype=mx.float16)
        return none, none
    return state.keys, state.values


def held_bytes(state: Any) -> int:
    """Bytes of the rows held in 16 bits."""
    keys, values = get_kv(state)
    return HALF_BYTES * (keys.size + values.size)


def full_bytes(tokens_seen: int, head_dim: int) -> int:
    """Bytes of all tokens in 16 bits."""
    return 2 * HALF_BYTES * tokens_seen * head_dim
