"""How a method lays a layer out: which tokens are in which form at any length, without MLX.

A layer has two streams, keys and values. A stream is `[sinks, exact][body, one codec][window,
exact]`; a *schedule* says how many tokens the body must hold once T tokens were seen, as a pure
function of T, so that the state never depends on how a prompt was cut into chunks.
The caches follow these plans and the planner sums them: one source for both.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Protocol

from veloxquant.quantizers.sizes import (
    BODY_STEP,
    WINDOW_STEP,
    CodecSpec,
    Held,
    LayerShape,
    round_up,
    store_bytes,
)
from veloxquant.quantizers.specs.plain import PlainSpec

PREFILL_CHUNK = 512
"""Prompt tokens per step that `Held.peak` assumes."""
TILE_TOKENS = 1024
"""History tokens decoded at a time when many queries read packed history."""
SCORE_BYTES = 64 << 20
"""Most bytes that one block of attention scores may take."""
COMPUTE_ITEMSIZE = 4
FUSED = sys.platform == "darwin"
"""Whether MLX's own attention keeps its scores on the chip."""


class Schedule(Protocol):
    """When tokens move from the window into the body."""

    def frontier(self, tokens: int) -> int:
        """Tokens that are in the body once `tokens` were seen (sinks not counted)."""
        ...


@dataclass(frozen=True)
class AtOnce:
    """Every token goes into the body when it is committed."""

    def frontier(self, tokens: int) -> int:
        """All of them."""
        return tokens


@dataclass(frozen=True)
class WholeBlocks:
    """The body takes blocks of `size` tokens, at absolute multiples of it."""

    size: int

    def frontier(self, tokens: int) -> int:
        """Tokens in complete blocks."""
        return tokens // self.size * self.size


@dataclass(frozen=True)
class Trailing:
    """The newest `keep` tokens stay out; older ones go in `step` at a time."""

    keep: int
    step: int = WINDOW_STEP

    def frontier(self, tokens: int) -> int:
        """Tokens older than the window, in whole steps."""
        return max(0, tokens - self.keep) // self.step * self.step


@dataclass(frozen=True)
class After:
    """Nothing goes into the body before `first` tokens came; then `then` decides.

    For codecs that are fitted to the first tokens.
    """

    first: int
    then: Schedule

    def frontier(self, tokens: int) -> int:
        """None at first, later what the other schedule says."""
        return self.then.frontier(tokens) if tokens >= self.first else 0


@dataclass(frozen=True)
class Below:
    """As another schedule up to `limit` tokens; those beyond stay exact."""

    limit: int
    then: Schedule

    def frontier(self, tokens: int) -> int:
        """What the other schedule says of the first tokens."""
        return self.then.frontier(min(tokens, self.limit))


@dataclass(frozen=True)
class Absolute:
    """As another schedule counted from the first token on, `sinks` before the first one here.

    Steps then end at round numbers of tokens. For codecs that take any number of tokens.
    """

    sinks: int
    then: Schedule

    def frontier(self, tokens: int) -> int:
        """What the other schedule says of all tokens, less the sinks."""
        return max(0, self.then.frontier(tokens + self.sinks) - self.sinks)


@lru_cache(maxsize=4096)
def moves(schedule: Schedule, tokens: int, growth: int) -> tuple[int, ...]:
    """Lengths below `tokens` after which tokens move into the body, as far as sizes can differ.

    The first one, and the latest ones until the pattern of moves and of a body that grows by
    `growth` tokens begins again. At these lengths most tokens wait. None where no token waits.
    """
    latest = _last_before_move(schedule, tokens)
    if latest == 0:
        return ()
    first = _first_move(schedule, latest + 1)
    if schedule.frontier(latest) == latest:  # none waits any more
        return (first,) if first else ()
    before = _last_before_move(schedule, latest)
    found = [first, latest]
    if before:
        step = latest - before
        found.extend(max(0, latest - n * step) for n in range(1, growth // gcd(growth, step)))
    return tuple(found)


def _last_before_move(schedule: Schedule, tokens: int) -> int:
    """The longest length whose body is smaller than that of `tokens`; 0 when there is none."""
    now = schedule.frontier(tokens)
    return max(0, bisect_left(range(tokens + 1), now, key=schedule.frontier) - 1) if now else 0


def _first_move(schedule: Schedule, tokens: int) -> int:
    """The longest length whose body is empty, when that of `tokens` is not."""
    return bisect_left(range(tokens + 1), 1, key=schedule.frontier) - 1


@dataclass(frozen=True)
class StreamPlan:
    """Layout of keys or of values: `n_sink` exact tokens, body in `spec`, exact window."""

    spec: CodecSpec
    schedule: Schedule
    n_sink: int = 0

    def rows(self, tokens: int) -> tuple[int, ...]:
        """Tokens in sinks, body and window once `tokens` were seen."""
        sinks = min(tokens, self.n_sink)
        body = self.schedule.frontier(tokens - sinks)
        return sinks, body, tokens - sinks - body

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of one head, growth steps included."""
        plain = PlainSpec()
        sinks, body, window = self.rows(tokens)
        return (
            store_bytes(plain, sinks, max(1, self.n_sink), dim, itemsize)
            + store_bytes(self.spec, body, BODY_STEP, dim, itemsize)
            + store_bytes(plain, window, WINDOW_STEP, dim, itemsize)
        )

    def fullest(self, tokens: int) -> Iterator[int]:
        """Lengths up to `tokens` among which is the one that takes most bytes."""
        yield tokens
        growth = round_up(BODY_STEP, self.spec.block)
        for waiting in moves(self.schedule, max(0, tokens - self.n_sink), growth):
            yield waiting + self.n_sink


@dataclass(frozen=True)
class LayerPlan:
    """Layout of one layer; equal for every sequence of a batch."""

    keys: StreamPlan
    values: StreamPlan

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        """Bytes held once `tokens` tokens are committed."""
        return shape.n_kv_heads * (
            self.keys.nbytes(tokens, shape.k_dim, shape.itemsize)
            + self.values.nbytes(tokens, shape.v_dim, shape.itemsize)
        )

    def held(self, shape: LayerShape, tokens: int) -> Held:
        """Bytes, rows and prefill peak of one sequence of `tokens` tokens."""
        nbytes = self.nbytes(shape, tokens)
        fullest = {*self.keys.fullest(tokens), *self.values.fullest(tokens)} - {tokens}
        most = max((self.nbytes(shape, n) for n in fullest), default=nbytes)
        plain = isinstance(self.keys.spec, PlainSpec)
        work = (exact_workspace if plain else workspace)(shape, tokens, PREFILL_CHUNK)
        above = max(0, most - nbytes)
        return Held(nbytes, tokens, nbytes + above + work, work, above)


def workspace(shape: LayerShape, tokens: int, chunk: int) -> int:
    """Transient bytes of one layer while `chunk` prompt tokens attend to `tokens` packed tokens.

    The chunk's own rows, keys and values being packed, one decoded tile, and one tile of the online
    softmax (scores, masked scores, weights). Measured: 1.1 to 2 times what MLX peaks at.
    """
    heads, dims = shape.n_kv_heads, shape.k_dim + shape.v_dim
    chunk, tile = min(chunk, tokens), min(TILE_TOKENS, tokens)
    packing = 2 * heads * chunk * dims * COMPUTE_ITEMSIZE
    decoded = 2 * heads * tile * dims * COMPUTE_ITEMSIZE
    scores = 3 * min(SCORE_BYTES, shape.n_q_heads * chunk * tile * COMPUTE_ITEMSIZE)
    return _chunk_rows(shape, chunk, COMPUTE_ITEMSIZE) + packing + decoded + scores


def exact_workspace(shape: LayerShape, tokens: int, chunk: int) -> int:
    """As `workspace` for rows that MLX's own attention reads.

    Its CPU backend holds the scores of a whole chunk; Metal's fused kernel holds none.
    """
    heads, dims = shape.n_kv_heads, shape.k_dim + shape.v_dim
    chunk = min(chunk, tokens)
    # One byte a pair is the causal mask.
    scores = 0 if FUSED else chunk * tokens * (shape.n_q_heads * shape.itemsize + 1)
    grown = heads * tokens * dims * shape.itemsize
    return _chunk_rows(shape, chunk, shape.itemsize) + grown + scores


def _chunk_rows(shape: LayerShape, chunk: int, itemsize: int) -> int:
    """Queries, keys, values and output of a chunk, in the model's type and in the computing one."""
    heads = shape.n_q_heads + shape.n_kv_heads
    return heads * chunk * (shape.k_dim + shape.v_dim) * (shape.itemsize + itemsize)
