"""How a method lays a layer out: which tokens are in which form at any length, without MLX.

A layer has two streams, keys and values. A stream is `[sinks, exact][body, one codec][window,
exact]`; a *schedule* says how many tokens the body must hold once T tokens were seen, as a pure
function of T, so that the state never depends on how a prompt was cut into chunks.
The caches follow these plans and the planner sums them: one source for both.
"""

from dataclasses import dataclass
from typing import Protocol

from veloxquant.quantizers.sizes import (
    BODY_STEP,
    WINDOW_STEP,
    CodecSpec,
    Held,
    LayerShape,
    PlainSpec,
    store_bytes,
)

PREFILL_CHUNK = 512
"""Prompt tokens per step that `Held.peak` assumes."""
TILE_TOKENS = 1024
"""History tokens decoded at a time when many queries read packed history."""
SCORE_BYTES = 64 << 20
"""Most bytes that one block of attention scores may take."""
COMPUTE_ITEMSIZE = 4


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
class StreamPlan:
    """Layout of keys or of values: `n_sink` exact tokens, body in `spec`, exact window."""

    spec: CodecSpec
    schedule: Schedule
    n_sink: int = 0

    def rows(self, tokens: int) -> tuple[int, int, int]:
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
        return Held(nbytes, tokens, nbytes + workspace(shape, tokens, PREFILL_CHUNK))


def workspace(shape: LayerShape, tokens: int, chunk: int) -> int:
    """Transient bytes of one layer while `chunk` prompt tokens attend to `tokens` tokens.

    The chunk's own keys, values, queries and output, a growth step being copied, one decoded tile,
    and the score blocks (scores, probabilities and the running output of the online softmax).
    """
    heads, dims = shape.n_kv_heads, shape.k_dim + shape.v_dim
    chunk = min(chunk, tokens)
    tile = min(TILE_TOKENS, tokens)
    fresh = heads * chunk * dims * (shape.itemsize + COMPUTE_ITEMSIZE)
    rows = 3 * shape.n_q_heads * chunk * dims * COMPUTE_ITEMSIZE
    decoded = 2 * heads * tile * dims * COMPUTE_ITEMSIZE
    scores = 3 * min(SCORE_BYTES, shape.n_q_heads * chunk * tile * COMPUTE_ITEMSIZE)
    return fresh + rows + decoded + scores
