"""What the documented quantizers do to their input and output: checks, types, norms.

A quantizer takes (batch, d) in any float type, computes in fp32, and answers in the type that it
was given. The type of the norms says which: fp16 rows have fp16 norms, and so on.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from veloxquant.core.context import EncodedVector
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.base import FP16_MAX

_TINY = 1e-30
_FLOATS = (mx.float16, mx.bfloat16, mx.float32)


class Rows(NamedTuple):
    """Vectors (batch, d) fp32 and the type they came in."""

    x: mx.array
    dtype: mx.Dtype


def _dtype(x: Any) -> tuple[mx.array, mx.Dtype]:
    if not isinstance(x, mx.array):
        x = np.asarray(x)
        half = x.dtype == np.float16
        return mx.array(x.astype(np.float32)), mx.float16 if half else mx.float32
    return x.astype(mx.float32), x.dtype if x.dtype in _FLOATS else mx.float32


def rows(x: Any, d: int) -> Rows:
    """Check vectors and convert them.

    Raises:
        ValueError: when they are not (batch, d).
    """
    array, dtype = _dtype(x)
    if array.ndim != 2 or array.shape[1] != d:
        raise ValueError(f"vectors of shape {array.shape}; this quantizer takes (batch, {d})")
    return Rows(array, dtype)


def query(q: Any, d: int) -> Rows:
    """Check a query, (d,) or (1, d), and convert it to (d,).

    Raises:
        ValueError: for another shape.
    """
    array, dtype = _dtype(q)
    if array.shape not in ((d,), (1, d)):
        raise ValueError(f"query of shape {array.shape}; this quantizer takes ({d},) or (1, {d})")
    return Rows(array.reshape(d), dtype)


def unit(x: mx.array) -> tuple[mx.array, mx.array]:
    """Directions (batch, d) and norms (batch,); a zero vector has direction zero."""
    peak = mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), _TINY)
    scaled = x / peak  # squares of large numbers stay finite
    length = mx.sqrt(mx.square(scaled).sum(axis=-1, keepdims=True))
    norm = mx.where(peak > _TINY, peak * length, 0.0)
    return scaled / mx.maximum(length, _TINY), norm[..., 0]


def narrow(norm: mx.array, dtype: mx.Dtype) -> mx.array:
    """Norms in the type of the rows; those of fp16 rows saturate."""
    return mx.minimum(norm, FP16_MAX).astype(dtype) if dtype == mx.float16 else norm.astype(dtype)


def norms(ev: EncodedVector, field: str = "norm") -> mx.array:
    """Norms of encoded vectors, fp32.

    Raises:
        ValueError: when the vector has none: it is another quantizer's.
    """
    return part(ev, field).astype(mx.float32)


def part(ev: EncodedVector, field: str) -> mx.array:
    """A field of encoded vectors that must be there.

    Raises:
        ValueError: when it is missing.
    """
    value = getattr(ev, field)
    if value is None:
        raise ValueError(
            f"an encoded vector of {ev.quantizer_type!r} without {field!r}; "
            f"give it to the quantizer that made it"
        )
    return value


def check_dim(d: int) -> None:
    """Refuse a length that is no whole number above zero.

    Raises:
        QuantizerConfigError: naming it.
    """
    if not isinstance(d, int) or isinstance(d, bool) or d < 1:
        raise QuantizerConfigError(f"d={d!r}; give the length of the vectors")
