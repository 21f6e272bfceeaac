"""Stages of the documented handler chain: each changes a `QuantizationContext` and passes it on.

A chain for decoding holds the same stages in the opposite order. Every stage looks at `ctx.mode`.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.codebooks.strategies import check_bits
from veloxquant.core.abstractions import Codebook, Preconditioner, QuantizationHandler, Transform
from veloxquant.core.constants import INT8_MAX
from veloxquant.core.context import QuantizationContext, TransformResult
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.preconditioners import QJLEncoder, as_fp32

__path__ = []  # the documented submodules are names of this one: see veloxquant.documented
__all__ = [
    "BitPackingHandler",
    "NormalizationHandler",
    "OutlierSplitHandler",
    "PolarTransformHandler",
    "QJLResidualHandler",
    "QuantizationContext",
    "QuantizationHandler",
    "RotationHandler",
    "ScalarQuantizerHandler",
    "ValueQuantizerHandler",
]


class _Stage(QuantizationHandler):
    """One stage: `encode` or `decode` by the mode, then the rest of the chain."""

    def handle(self, ctx: QuantizationContext) -> QuantizationContext:
        """Do this stage's work and pass the context on.

        Raises:
            ValueError: for an unknown mode, or when a stage that this one needs is missing.
        """
        if ctx.mode == "encode":
            self._encode(ctx)
        elif ctx.mode == "decode":
            self._decode(ctx)
        else:
            raise ValueError(f"mode {ctx.mode!r} is neither 'encode' nor 'decode'")
        return self._pass_on(ctx)

    def _encode(self, ctx: QuantizationContext) -> None:
        raise NotImplementedError

    def _decode(self, ctx: QuantizationContext) -> None:
        raise NotImplementedError

    def _need(self, value: Any, what: str) -> Any:
        if value is None:
            raise ValueError(f"{self.handler_name} needs {what}, which no earlier stage has set")
        return value


class NormalizationHandler(_Stage):
    """Unit norm on encode, the norm back on decode; norms below `eps` count as `eps`."""

    def __init__(self, eps: float = 1e-8) -> None:
        self.eps = eps

    def _encode(self, ctx: QuantizationContext) -> None:
        x = as_fp32(ctx.x_current)
        peak = mx.maximum(mx.abs(x).max(axis=-1, keepdims=True), self.eps)
        ctx.norm = (peak * mx.linalg.norm(x / peak, axis=-1, keepdims=True))[..., 0]
        ctx.x_current = x / mx.maximum(ctx.norm, self.eps)[..., None]

    def _decode(self, ctx: QuantizationContext) -> None:
        norm = as_fp32(self._need(ctx.norm, "norms"))
        ctx.x_current = as_fp32(ctx.x_current) * norm[..., None]


class RotationHandler(_Stage):
    """Apply a preconditioner on encode, undo it on decode."""

    def __init__(self, preconditioner: Preconditioner) -> None:
        self.preconditioner = preconditioner

    def _encode(self, ctx: QuantizationContext) -> None:
        ctx.x_current = ctx.rotated = self.preconditioner.apply(ctx.x_current)

    def _decode(self, ctx: QuantizationContext) -> None:
        ctx.x_current = self.preconditioner.apply_inverse(ctx.x_current)


class ScalarQuantizerHandler(_Stage):
    """Code by a codebook; `x_current` becomes what the codes mean, the input goes to metadata."""

    def __init__(self, codebook: Codebook) -> None:
        self.codebook = codebook

    def _encode(self, ctx: QuantizationContext) -> None:
        ctx.metadata["x_pre_quant"] = ctx.x_current
        ctx.indices = self.codebook.quantize(ctx.x_current)
        ctx.x_current = self.codebook.dequantize(ctx.indices)

    def _decode(self, ctx: QuantizationContext) -> None:
        ctx.x_current = self.codebook.dequantize(self._need(ctx.indices, "indices"))


class QJLResidualHandler(_Stage):
    """Sketch what the codebook left. Decoding leaves vectors as they are: signs serve products."""

    def __init__(self, encoder: QJLEncoder) -> None:
        self.encoder = encoder

    def _encode(self, ctx: QuantizationContext) -> None:
        before = as_fp32(self._need(ctx.metadata.get("x_pre_quant"), "x_pre_quant"))
        ctx.signs, ctx.residual_norm = self.encoder.encode_key(before - as_fp32(ctx.x_current))

    def _decode(self, ctx: QuantizationContext) -> None:
        self._need(ctx.signs, "signs")


class BitPackingHandler(_Stage):
    """Indices of `b` bits to bytes, each row alone: one little-endian bit stream, and back."""

    def __init__(self, b: int, d: int) -> None:
        check_bits(b)
        if d < 1:
            raise QuantizerConfigError(f"d={d!r}; give the length of a row")
        self.b, self.d = b, d

    def _encode(self, ctx: QuantizationContext) -> None:
        codes = np.array(self._need(ctx.indices, "indices")).astype(np.uint8)
        if codes.shape[-1] != self.d or (codes >> self.b).any():
            raise ValueError(
                f"indices of shape {codes.shape} up to {codes.max(initial=0)} do not fit rows of "
                f"{self.d} with {self.b} bits"
            )
        bits = codes[..., None] >> np.arange(self.b, dtype=np.uint8) & 1
        flat = bits.reshape(*codes.shape[:-1], self.d * self.b)
        ctx.packed_bits = np.packbits(flat, axis=-1, bitorder="little")

    def _decode(self, ctx: QuantizationContext) -> None:
        packed = np.asarray(self._need(ctx.packed_bits, "packed bits"))
        flat = np.unpackbits(packed, axis=-1, count=self.d * self.b, bitorder="little")
        bits = flat.reshape(*packed.shape[:-1], self.d, self.b)
        ctx.indices = mx.array((bits << np.arange(self.b, dtype=np.uint8)).sum(-1, dtype=np.uint8))


class OutlierSplitHandler(_Stage):
    """Set outlier channels aside as they are (`x_outlier` in metadata) and put them back."""

    def __init__(self, outlier_idx: np.ndarray) -> None:
        index = np.asarray(outlier_idx).reshape(-1).astype(np.int64)
        if not len(index) or len(np.unique(index)) != len(index) or index.min() < 0:
            raise QuantizerConfigError(f"outlier_idx {index.tolist()} must be different channels")
        self.outlier_idx = index.astype(np.int32)

    def _order(self, d: int) -> np.ndarray:
        if self.outlier_idx.max() >= d:
            raise ValueError(f"outlier channel {self.outlier_idx.max()} of vectors of length {d}")
        rest = np.setdiff1d(np.arange(d), self.outlier_idx)
        return np.concatenate([self.outlier_idx, rest]).astype(np.int32)

    def _encode(self, ctx: QuantizationContext) -> None:
        x, n = ctx.x_current, len(self.outlier_idx)
        order = self._order(x.shape[-1])
        moved = mx.take(x, mx.array(order), axis=-1) if isinstance(x, mx.array) else x[..., order]
        ctx.outlier_idx = self.outlier_idx
        ctx.metadata["x_outlier"], ctx.x_current = moved[..., :n], moved[..., n:]

    def _decode(self, ctx: QuantizationContext) -> None:
        outliers = self._need(ctx.metadata.get("x_outlier"), "x_outlier")
        x = ctx.x_current
        back = np.argsort(self._order(x.shape[-1] + len(self.outlier_idx))).astype(np.int32)
        if isinstance(x, mx.array) or isinstance(outliers, mx.array):
            outliers = outliers if isinstance(outliers, mx.array) else mx.array(outliers)
            x = x if isinstance(x, mx.array) else mx.array(x)
            whole = mx.concatenate([outliers.astype(x.dtype), x], axis=-1)
            ctx.x_current = mx.take(whole, mx.array(back), axis=-1)
        else:
            ctx.x_current = np.concatenate([outliers, x], axis=-1)[..., back]


class PolarTransformHandler(_Stage):
    """Angles and a radius on encode, vectors from them on decode."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def _encode(self, ctx: QuantizationContext) -> None:
        found = self.transform.forward(ctx.x_current)
        ctx.angles, ctx.final_radius = found.angles, found.final_radius

    def _decode(self, ctx: QuantizationContext) -> None:
        angles = self._need(ctx.angles, "angles")
        radius = self._need(ctx.final_radius, "a radius")
        ctx.x_current = self.transform.inverse(TransformResult(angles, radius, len(angles)))


class ValueQuantizerHandler(_Stage):
    """Eight bits a number with one scale a vector, `v_scale` in metadata, (batch,) fp32."""

    def _encode(self, ctx: QuantizationContext) -> None:
        x = as_fp32(ctx.x_current)
        scale = mx.abs(x).max(axis=-1) / INT8_MAX
        ctx.metadata["v_scale"] = scale
        divisor = mx.where(scale > 0, scale, 1.0)[..., None]
        ctx.x_current = mx.clip(mx.round(x / divisor), -INT8_MAX, INT8_MAX).astype(mx.int8)

    def _decode(self, ctx: QuantizationContext) -> None:
        scale = as_fp32(self._need(ctx.metadata.get("v_scale"), "v_scale"))
        ctx.x_current = as_fp32(ctx.x_current) * scale[..., None]
