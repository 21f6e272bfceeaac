"""What a format costs: bytes of every codec in plain Python, shared by the planner and the caches.

A *spec* names a codec and its parameters and knows its size; `quantizers/codecs.py` turns it into
the codec that computes. All sizes are bytes for one KV head unless a shape is given.
"""

from dataclasses import dataclass
from typing import NamedTuple

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
    other, so a model needs it once.
    """

    nbytes: int
    rows: int
    peak: int
    work: int = 0

    def times(self, n: int) -> "Held":
        """The same for `n` independent sequences."""
        return Held(self.nbytes * n, self.rows, self.peak * n, self.work * n)


def round_up(n: int, step: int) -> int:
    """Smallest multiple of `step` that is at least `n`."""
    return -(-n // step) * step


@dataclass(frozen=True)
class PlainSpec:
    """Rows as they came: `dim` elements in the input's type."""

    name = "plain"
    block = 1
    token_local = True

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        return tokens * dim * itemsize

    def describe(self) -> str:
        """Short name for tables."""
        return "16 bit"


@dataclass(frozen=True)
class AffineTokenSpec:
    """MLX affine groups along D: each token carries a scale and a minimum per `group` channels.

    Source: the format of `mx.quantize`; KIVI (arXiv 2402.02750) for values.
    """

    bits: int
    group: int
    name = "affine_token"
    block = 1
    token_local = True

    def padded(self, dim: int) -> int:
        """Channels stored: `dim` rounded up to whole groups."""
        return round_up(dim, self.group)

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        padded = self.padded(dim)
        return tokens * (padded * self.bits // 8 + 2 * itemsize * padded // self.group)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit/g{self.group}"


@dataclass(frozen=True)
class AffineChannelSpec:
    """MLX affine groups along T: each channel carries a scale and a minimum per `group` tokens.

    Source: KIVI (arXiv 2402.02750) for keys.
    """

    bits: int
    group: int
    name = "affine_channel"
    token_local = False

    @property
    def block(self) -> int:
        """Tokens that share a scale."""
        return self.group

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`, a multiple of `group`."""
        return dim * (tokens * self.bits // 8 + 2 * itemsize * tokens // self.group)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit/channel g{self.group}"


@dataclass(frozen=True)
class CodebookSpec:
    """Rotated Lloyd–Max codes in two planes (`bits`-1 and 1 bit) and one norm per token.

    `unbiased` picks the norm: for keys the one that leaves inner products unbiased, for values the
    one with least squared error. Source: TurboQuant (arXiv 2504.19874), `methods/turboquant_rvq`.
    """

    bits: int
    seed: int
    unbiased: bool
    name = "codebook"
    block = 1
    token_local = True

    def planes(self) -> tuple[tuple[int, int], ...]:
        """Width and shift of each plane, high bits first; widths divide a word."""
        coarse = {1: (), 2: (1,), 3: (2,), 4: (2, 1), 5: (4,), 6: (4, 1)}[self.bits]
        out, left = [], self.bits
        for width in (*coarse, 1):
            left -= width
            out.append((width, left))
        return tuple(out)

    def plane_words(self, dim: int) -> tuple[int, int]:
        """uint32 words of the coarse and of the refinement plane of one token."""
        lanes = round_up(dim, 32) // 32
        return lanes * max(1, self.bits - 1), lanes if self.bits > 1 else 0

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        return tokens * (sum(self.plane_words(dim)) * WORD_BYTES + itemsize)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.bits} bit rotated"


CodecSpec = PlainSpec | AffineTokenSpec | AffineChannelSpec | CodebookSpec


def store_bytes(spec: CodecSpec, tokens: int, step: int, dim: int, itemsize: int) -> int:
    """Bytes of one head of a store that grew to hold `tokens` in steps of `step`; 0 when empty."""
    return spec.nbytes(round_up(tokens, step), dim, itemsize)
