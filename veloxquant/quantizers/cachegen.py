"""Group codes and their entropy as functions on plain matrices, for analysis.

Groups run along tokens, one scale and minimum for each group and channel. Caches use `chunk.py`,
and `delta.py` codes what is sent; every function takes leading axes, so the `_batched` names are
the same functions.
Source: CacheGen (arXiv 2310.07240).
"""

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

PARAM_BYTES = 4
"""fp16 scale and minimum of a group and channel."""
MIN_BITS = 2


class CodeStream(NamedTuple):
    """Integer codes (..., groups, g, D) as fp32, scales and minima (..., groups, 1, D).

    The last group may hold more rows than the `n_rows` that count.
    """

    codes: mx.array
    scale: mx.array
    zero: mx.array
    n_rows: int
    bits: int


def quantize_to_codes(x: mx.array, bits: int, group_size: int = 32) -> CodeStream:
    """Codes of (..., N, D) on grids from the least to the largest entry of each group.

    Args:
        x: rows; a last short group is filled up with its last row.
        bits: 1 to 8.
        group_size: rows that share a grid.
    """
    x = x.astype(mx.float32)
    *lead, n, d = x.shape
    missing = -n % group_size
    if missing:
        x = mx.concatenate([x, mx.repeat(x[..., -1:, :], missing, axis=-2)], axis=-2)
    groups = x.reshape(*lead, (n + missing) // group_size, group_size, d)
    low, high = groups.min(axis=-2, keepdims=True), groups.max(axis=-2, keepdims=True)
    top = (1 << bits) - 1
    scale = (high - low) / top
    codes = mx.round((groups - low) / mx.where(scale > 0, scale, 1.0))
    return CodeStream(mx.clip(codes, 0, top), scale, low, n, bits)


def dequant_codes(stream: CodeStream) -> mx.array:
    """Rows (..., n_rows, D) fp16."""
    return widened(stream).astype(mx.float16)


def widened(stream: CodeStream) -> mx.array:
    """Rows (..., n_rows, D) fp32."""
    rows = stream.codes * stream.scale + stream.zero
    return _flat(rows)[..., : stream.n_rows, :]


def _flat(groups: mx.array) -> mx.array:
    *lead, count, size, d = groups.shape
    return groups.reshape(*lead, count * size, d)


def token_delta(codes_flat: mx.array) -> mx.array:
    """Codes (..., N, D) with every row but the first less the row before."""
    rest = codes_flat[..., 1:, :] - codes_flat[..., :-1, :]
    return mx.concatenate([codes_flat[..., :1, :], rest], axis=-2)


def symbol_entropy_bits(symbols: mx.array) -> float:
    """Empirical Shannon entropy of integer symbols of any shape, in bits for each; 0.0 for none."""
    flat = np.asarray(symbols.astype(mx.int32)).ravel()
    return _entropy(flat)


def _entropy(flat: np.ndarray) -> float:
    if not flat.size:
        return 0.0
    share = np.unique(flat, return_counts=True)[1] / flat.size
    return float(-(share * np.log2(share)).sum()) + 0.0


def entropy_coded_bytes_batched(
    stream: CodeStream, use_delta: bool = True, per_channel: bool = True
) -> list[int]:
    """As `entropy_coded_bytes` for each matrix of a stream with one leading axis."""
    codes = np.asarray(_flat(stream.codes)[..., : stream.n_rows, :].astype(mx.int32))
    return [
        min(_coded(one, use_delta, per_channel) + _param_bytes(stream), most)
        for one, most in zip(codes, fixed_width_bytes_batched(stream), strict=True)
    ]


def entropy_coded_bytes(
    stream: CodeStream, use_delta: bool = True, per_channel: bool = True
) -> int:
    """Bytes that an ideal entropy coder takes, scales and minima included.

    Never above `fixed_width_bytes`: what coding would enlarge is sent as it is.

    Args:
        stream: codes of one matrix.
        use_delta: allow differences to the row before, where they have less entropy.
        per_channel: a distribution for each channel, else one for all.
    """
    return entropy_coded_bytes_batched(_as_batch(stream), use_delta, per_channel)[0]


def _as_batch(stream: CodeStream) -> CodeStream:
    return stream._replace(
        codes=stream.codes[None], scale=stream.scale[None], zero=stream.zero[None]
    )


def _coded(codes: np.ndarray, use_delta: bool, per_channel: bool) -> int:
    forms = [codes]
    if use_delta:
        forms.append(np.concatenate([codes[:1], np.diff(codes, axis=0)]))
    if per_channel:
        columns = [[_entropy(form[:, d]) for form in forms] for d in range(codes.shape[1])]
        bits = sum(min(each) for each in columns) * len(codes)
    else:
        bits = min(_entropy(form.ravel()) for form in forms) * codes.size
    return math.ceil(bits / 8)


def fixed_width_bytes_batched(stream: CodeStream) -> list[int]:
    """As `fixed_width_bytes` for each matrix of a stream with one leading axis."""
    count = stream.n_rows * stream.codes.shape[-1]
    one = math.ceil(stream.bits * count / 8) + _param_bytes(stream)
    return [one] * stream.codes.shape[0]


def fixed_width_bytes(stream: CodeStream) -> int:
    """Bytes of the codes at their width, scales and minima included."""
    return fixed_width_bytes_batched(_as_batch(stream))[0]


def _param_bytes(stream: CodeStream) -> int:
    return PARAM_BYTES * stream.scale.shape[-3] * stream.scale.shape[-1]


def layer_group_bits(n_layers: int, base_bits: int, n_groups: int = 3) -> list[int]:
    """Bits of each layer: `base_bits` in the first of `n_groups` runs of layers, one less in each.

    Raises:
        ValueError: when there are no layers or groups.
    """
    if n_layers < 1 or n_groups < 1:
        raise ValueError(f"n_layers={n_layers} and n_groups={n_groups} must be at least 1")
    groups = min(n_groups, n_layers)
    least = min(MIN_BITS, base_bits)
    return [max(least, base_bits - layer * groups // n_layers) for layer in range(n_layers)]


def cachegen_quant_dequant(x: mx.array, bits: int, group_size: int = 32) -> mx.array:
    """Rows (..., N, D) as their codes give them back, fp16."""
    return dequant_codes(quantize_to_codes(x, bits, group_size))


quantize_to_codes_batched = quantize_to_codes
dequant_codes_batched = dequant_codes
token_delta_batched = token_delta
