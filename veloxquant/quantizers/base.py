"""What a codec is: vectors in, packed arrays out, and products computed from the packed form."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import mlx.core as mx

from veloxquant.kernels.native import NativeRun
from veloxquant.quantizers.factory import QuantizerFactory
from veloxquant.quantizers.sizes import CodecSpec

__all__ = [
    "FP16_MAX",
    "Codec",
    "FittedCodec",
    "NativeParts",
    "Packed",
    "QuantizerFactory",
    "Shared",
    "TokenAxis",
    "compute_dtype",
    "headroom",
    "is_order",
    "saturated",
]

Packed = dict[str, mx.array]
NativeParts = NativeRun | tuple[NativeRun, ...]


class TokenAxis(NamedTuple):
    """Where tokens lie in an array: axis, and `num`/`den` indices for each token."""

    axis: int
    num: int = 1
    den: int = 1

    def at(self, tokens: int) -> int:
        """Index along the axis at which token number `tokens` starts."""
        return tokens * self.num // self.den


class Codec(Protocol):
    """Immutable constants of one format for one head size; shared by layers and sequences.

    Shapes: B sequences, H KV heads, M query rows, T tokens, D head size. `packed` holds a whole
    store, its token axis at capacity; scores and weights are fp32 or the query's type.
    """

    spec: CodecSpec
    dim: int
    axes: Mapping[str, TokenAxis]
    foreign: tuple[mx.array, ...]
    """Constants from outside that packed arrays mean nothing without; what a seed gives is none."""
    limits: Mapping[str, int]
    """Arrays whose values are places in something, and the number that these stay below."""

    def encode(self, x: mx.array) -> Packed:
        """Pack (B, H, n, D), n a multiple of `spec.block`."""
        ...

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Inner products of queries (B, H, M, D) with all T tokens: (B, H, M, T)."""
        ...

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Weighted sums of tokens: weights (B, H, M, T) to (B, H, M, D)."""
        ...

    def native(self, packed: Packed, start: int, stop: int) -> NativeParts | None:
        """Tokens [start, stop) as the compiled kernel reads them, None if it lacks the form.

        A tuple holds parts that add up, each in its own basis.
        """
        ...

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """All tokens of the given arrays, unpacked: (B, H, T, D)."""
        ...

    def fault(self, packed: Packed) -> str | None:
        """What is impossible in arrays from a file beyond `limits`, None if nothing is."""
        ...


class FittedCodec(Codec, Protocol):
    """A codec whose constants are fitted once, to the first `spec.fit_tokens` tokens of a store.

    Constants are arrays without a token axis: they stand in `packed` beside the codes, but not in
    `axes`; a store keeps, saves and counts them, and forgets them when it is empty again.
    """

    def fit(self, x: mx.array) -> Packed:
        """Constants for rows like (B, H, fit_tokens, D)."""
        ...

    def encode_fitted(self, x: mx.array, fitted: Packed) -> Packed:
        """Pack (B, H, n, D) with these constants; they are not part of the result."""
        ...


def compute_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """The type attention computes in: fp32 on the CPU backend, where 16-bit products are loops."""
    return dtype if mx.default_device() == mx.gpu else mx.float32


FP16_MAX = 65504.0


def saturated(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """`x` in `dtype`; what fp16 cannot hold becomes its largest number instead of infinity.

    Rows near that number decode, with their error, to a little more.
    """
    return (mx.clip(x, -FP16_MAX, FP16_MAX) if dtype == mx.float16 else x).astype(dtype)


def headroom(dim: int, dtype: mx.Dtype) -> float:
    """What projections of rows (..., dim) are divided by to fit into `dtype`; 1 except for fp16.

    A power of two, so nothing is rounded: twice the most by which a vector is longer than its
    largest entry.
    """
    return 2.0 ** math.ceil(math.log2(2 * math.sqrt(dim))) if dtype == mx.float16 else 1.0


def is_order(index: mx.array) -> bool:
    """Whether the last axis of integers holds each of its places once; waits for the array."""
    places = mx.arange(index.shape[-1], dtype=index.dtype)
    return bool((mx.sort(index, axis=-1) == places).all().item())


class Shared:
    """Base of codecs: copies of a cache share their codec, and any words are codes."""

    foreign: tuple[mx.array, ...] = ()
    limits: Mapping[str, int] = MappingProxyType({})

    def fault(self, packed: Packed) -> str | None:
        """Nothing: the shapes of the arrays say it all."""
        del packed
        return None

    def __deepcopy__(self, memo: object) -> "Shared":
        """Constants are shared by copies."""
        return self
