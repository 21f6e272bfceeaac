"""Rotary position encoding as plain functions of positions: forward, back, windowed, constant.

Pairs are (d, d + D/2), as mlx-lm's `traditional=False`. Angles are computed in fp32 from positions
and wavelengths; `freqs` is a table of `angle = position / freqs` for each pair, as `mx.fast.rope`
takes it, None for `base^(2d/D)`.
Source: A2ATS (arXiv 2502.12665), section on windowed rotary position embedding.
"""

import math
from typing import Any

import mlx.core as mx

from veloxquant.core.exceptions import QuantizerConfigError


def plain_freqs(dim: int, base: float) -> mx.array:
    """`base^(2d/D)` for each pair, (D/2,) fp32."""
    return base ** (mx.arange(0, dim, 2, dtype=mx.float32) / dim)


def rope_freqs_from_scaling(
    head_dim: int, base: float, scaling: dict[str, Any] | None
) -> mx.array | None:
    """Table of a scaled encoding, (D/2,) fp32; None for the plain one.

    Raises:
        QuantizerConfigError: for a type other than default, linear, llama3 or yarn, or a missing
            factor.
    """
    kind = (scaling or {}).get("type") or (scaling or {}).get("rope_type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise QuantizerConfigError(
            f"a2ats_rope_scaling of type {kind!r} is unknown; it must be default, linear, llama3 "
            f"or yarn"
        )
    assert scaling is not None
    if "factor" not in scaling:
        raise QuantizerConfigError(f"a2ats_rope_scaling of type {kind!r} must have a 'factor'")
    factor = float(scaling["factor"])
    freqs = plain_freqs(head_dim, base)
    if kind == "linear":
        return freqs * factor
    return (_llama3 if kind == "llama3" else _yarn)(freqs, factor, scaling, base)


def _llama3(freqs: mx.array, factor: float, scaling: dict[str, Any], base: float) -> mx.array:
    del base
    low, high = scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0)
    old = scaling.get("original_max_position_embeddings", 8192)
    waves = 2 * math.pi * freqs
    smooth = (old / waves - low) / (high - low)
    between = freqs / ((1 - smooth) / factor + smooth)
    slow = mx.where(waves > old / low, freqs * factor, freqs)
    return mx.where((waves > old / high) & (waves < old / low), between, slow)


def _yarn(freqs: mx.array, factor: float, scaling: dict[str, Any], base: float) -> mx.array:
    old = scaling.get("original_max_position_embeddings", 4096)
    n = freqs.shape[0]

    def at(turns: float) -> float:
        return n * math.log(old / (turns * 2 * math.pi)) / math.log(base)

    low = max(math.floor(at(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(at(scaling.get("beta_slow", 1))), 2 * n - 1)
    ramp = mx.clip((mx.arange(n, dtype=mx.float32) - low) / max(high - low, 1e-3), 0, 1)
    keep = 1 - ramp
    return factor * freqs * freqs / (factor * freqs * keep + freqs * (1 - keep))


def rotate(
    x: mx.array, positions: mx.array, freqs: mx.array, *, traditional: bool = False
) -> mx.array:
    """Rows (..., n, D) turned to `positions` (n,) or (); channels past `2·len(freqs)` stay."""
    half = freqs.shape[0]
    angle = positions.astype(mx.float32)[..., None] / freqs
    cos, sin = mx.cos(angle), mx.sin(angle)
    wide = x.astype(mx.float32)
    part, rest = wide[..., : 2 * half], wide[..., 2 * half :]
    if traditional:
        a, b = part[..., ::2], part[..., 1::2]
        out = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).flatten(-2)
    else:
        a, b = part[..., :half], part[..., half:]
        out = mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    if rest.shape[-1]:
        out = mx.concatenate([out, rest], axis=-1)
    return out.astype(x.dtype)


def _freqs(x: mx.array, base: float, freqs: mx.array | None) -> mx.array:
    return plain_freqs(x.shape[-1], base) if freqs is None else freqs


def a2ats_apply_exact_rope(
    x: mx.array, positions: mx.array, base: float = 10000.0, freqs: mx.array | None = None
) -> mx.array:
    """Rows (N, D) turned to their own positions (N,)."""
    return rotate(x, positions, _freqs(x, base, freqs))


def a2ats_apply_windowed_rope(
    x: mx.array,
    positions: mx.array,
    query_position: int,
    window: int = 128,
    base: float = 10000.0,
    freqs: mx.array | None = None,
) -> mx.array:
    """Rows (N, D) nearer than `window` to the query turned; the others stay unrotated."""
    near = query_position - positions < window
    return mx.where(near[..., None], a2ats_apply_exact_rope(x, positions, base, freqs), x)


def a2ats_apply_far_query_rope(
    q: mx.array, b: int = 2048, base: float = 10000.0, freqs: mx.array | None = None
) -> mx.array:
    """Unrotated queries (..., D) turned by the constant distance `b` that far tokens are given."""
    return rotate(q, mx.array(float(b)), _freqs(q, base, freqs))


def rope_remap_positions(
    x: mx.array,
    old_positions: mx.array,
    new_positions: mx.array,
    base: float = 10000.0,
    freqs: mx.array | None = None,
) -> mx.array:
    """Rows (N, D) turned from old to new positions, (N,) each."""
    return rotate(x, new_positions - old_positions, _freqs(x, base, freqs))


class PositionCode:
    """The encoding of one layer: its table, its pairs, and rows turned by any positions."""

    def __init__(self, freqs: mx.array, *, traditional: bool = False) -> None:
        self.freqs, self.traditional = freqs, traditional

    @classmethod
    def of(
        cls, rope: Any | None, dim: int, base: float, scaling: dict[str, Any] | None
    ) -> "PositionCode":
        """From a layer's own encoding where its table can be read, else from base and scaling."""
        dims = getattr(rope, "dims", None) or getattr(rope, "dim", None)
        traditional = bool(getattr(rope, "traditional", False))
        table = getattr(rope, "_freqs", None)
        if isinstance(table, mx.array) and table.ndim == 1:
            return cls(table.astype(mx.float32), traditional=traditional)
        own = getattr(rope, "base", None)
        if isinstance(dims, int) and isinstance(own, int | float):
            scale = float(getattr(rope, "scale", 1.0) or 1.0)
            return cls(plain_freqs(dims, float(own)) / scale, traditional=traditional)
        table = rope_freqs_from_scaling(dim, base, scaling)
        return cls(plain_freqs(dim, base) if table is None else table)

    def turn(self, x: mx.array, positions: mx.array) -> mx.array:
        """Rows (..., n, D) turned forward by `positions`, fp32 angles."""
        return rotate(x, positions, self.freqs, traditional=self.traditional)

    def __deepcopy__(self, memo: object) -> "PositionCode":
        """Constants are shared by copies."""
        return self
