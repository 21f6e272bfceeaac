"""What a format costs: bytes of every codec in plain Python, shared by the planner and the caches.

A *spec* names a codec and its parameters and knows its size; `quantizers/codecs.py` turns it into
the codec that computes. All sizes are bytes for one KV head unless a shape is given.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

BODY_STEP = 128
"""Tokens by which packed stores grow."""
WINDOW_STEP = 32
"""Tokens by which full-precision windows grow."""
WORD_BYTES = 4


class LayerShape(NamedTuple):
    """Attention shape of one layer; `itemsize` is bytes per element of keys and values."""

    n_q_heads: int
    n_kv_heads: int
    k_dim: int
    v_dim: int
    itemsize: int = 2

    def full_bytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of uncompressed keys and values of `tokens` tokens, without growth steps."""
        return batch * self.n_kv_heads * tokens * (self.k_dim + self.v_dim) * self.itemsize


class Held(NamedTuple):
    """What a layer holds: `nbytes` with growth steps, `rows` kept, `peak` bytes in prefill.

    `work` is the part of `peak` that is gone once the layer was read: layers are read one after the
    other, so a model needs it once. `above` is what a shorter sequence can hold beyond `nbytes`,
    where tokens wait exact for a whole block.
    """

    nbytes: int
    rows: int
    peak: int
    work: int = 0
    above: int = 0

    @property
    def most(self) -> int:
        """Most bytes on the way to this length, itself included."""
        return self.nbytes + self.above

    def plus(self, nbytes: int) -> "Held":
        """The same with `nbytes` more that are held all the time."""
        return self._replace(nbytes=self.nbytes + nbytes, peak=self.peak + nbytes)

    def times(self, n: int) -> "Held":
        """The same for `n` independent sequences."""
        return Held(self.nbytes * n, self.rows, self.peak * n, self.work * n, self.above * n)


def round_up(n: int, step: int) -> int:
    """Smallest multiple of `step` that is at least `n`."""
    return -(-n // step) * step


class CodecSpec(ABC):
    """A format and its parameters; subclasses are frozen dataclasses under `quantizers/specs/`.

    `codec` names the class that computes, as "module:class"; `token_local` says whether tokens can
    be picked and moved one by one.
    """

    name: ClassVar[str]
    codec: ClassVar[str]
    token_local: ClassVar[bool] = True

    @property
    def block(self) -> int:
        """Tokens that are coded together."""
        return 1

    @property
    def fit_tokens(self) -> int:
        """First tokens that the codec's constants are fitted to; 0 for codecs without any."""
        return 0

    @abstractmethod
    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of one head of a store with capacity for `tokens`, a multiple of `block`.

        Fitted constants count as soon as there is a token. `itemsize` is that of the rows.
        """

    @abstractmethod
    def describe(self) -> str:
        """Short name for tables."""


def store_bytes(spec: CodecSpec, tokens: int, step: int, dim: int, itemsize: int) -> int:
    """Bytes of one head of a store that grew to hold `tokens` in steps of `step`; 0 when empty."""
    return spec.nbytes(round_up(tokens, round_up(step, spec.block)), dim, itemsize) if tokens else 0
