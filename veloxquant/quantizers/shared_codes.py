"""Codes of one layer read by its neighbours, each with scales of its own.

The scales of a reading layer are the least squares fit of its rows to the codes of the first one;
what the fit leaves may be coded once more. Layers whose rows are affine maps of each other within
a group lose nothing by sharing.
Source: XQuant (arXiv 2510.11236). Differs: least squares instead of the layer's own minimum and
maximum; at one and two bits the grid is that of `quantizers.affine`, whose error is that of the
published calibration of its ends (unit Gaussian, group 32: 0.36 and 0.132 against 0.38 and 0.134).
"""

from collections.abc import Sequence

import mlx.core as mx

from veloxquant.dsa.mlx_pack import unpack
from veloxquant.kernels.native import NativeRun
from veloxquant.quantizers.affine import AffineChannelCodec, AffineTokenCodec
from veloxquant.quantizers.base import Packed, saturated
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.shared import SharedCodesSpec
from veloxquant.quantizers.together import TogetherCodec

_TINY = 1e-20
_REST = "r."


def least_squares(x: mx.array, codes: mx.array) -> tuple[mx.array, mx.array]:
    """Factor and offset that bring codes (..., n) nearest to `x` (..., n): two (..., 1), fp32.

    Equal codes get factor 0 and the mean.
    """
    x, codes = x.astype(mx.float32), codes.astype(mx.float32)
    mean, middle = x.mean(axis=-1, keepdims=True), codes.mean(axis=-1, keepdims=True)
    away = codes - middle
    spread = mx.square(away).sum(axis=-1, keepdims=True)
    slope = ((x - mean) * away).sum(axis=-1, keepdims=True)
    factor = mx.where(spread > _TINY, slope / mx.maximum(spread, _TINY), 0.0)
    return factor, mean - factor * middle


class SharedCodesCodec(TogetherCodec):
    """`w` of the first layer; `s`, `b` of each; `r.w`, `r.s`, `r.b` for coded residuals."""

    borrowed = ("w",)

    def __init__(self, dim: int, spec: SharedCodesSpec) -> None:
        self.dim, self.spec = dim, spec
        self.base: AffineChannelCodec | AffineTokenCodec = codec_for(spec.base, dim)  # type: ignore[assignment]
        rest = spec.of(1, 2).correction
        self.rest = codec_for(rest, dim) if rest else None
        self.axes = dict(self.base.axes)
        if not spec.owns and self.rest:
            self.axes |= {_REST + name: axis for name, axis in self.rest.axes.items()}

    def encode_together(self, rows: Sequence[mx.array], fitted: Sequence[Packed]) -> list[Packed]:
        """Codes of the first layer's rows, scales and residuals of the others'."""
        del fitted
        first = self.base.encode(rows[0])
        codes = self._codes(first["w"], rows[0].shape[2])
        return [first, *(self._reading(x, first["w"], codes) for x in rows[1:])]

    def _codes(self, words: mx.array, tokens: int) -> mx.array:
        """Codes in groups along the last axis."""
        along = tokens if self.spec.along_tokens else self.base.width  # type: ignore[union-attr]
        codes = unpack(words, self.spec.base.bits, along)
        return codes.reshape(*codes.shape[:-1], -1, self.spec.base.group)

    def _reading(self, x: mx.array, words: mx.array, codes: mx.array) -> Packed:
        wide = x.swapaxes(-1, -2)
        if isinstance(self.base, AffineTokenCodec):
            missing = self.base.width - x.shape[-1]
            wide = mx.concatenate([x, mx.repeat(x[..., -1:], missing, axis=-1)], axis=-1)
        factor, offset = least_squares(wide.reshape(codes.shape), codes)
        out = {"s": saturated(factor[..., 0], x.dtype), "b": saturated(offset[..., 0], x.dtype)}
        if self.rest is None:
            return out
        got = self.base.decode({"w": words, **out}, mx.float32)
        rest = self.rest.encode(saturated(x.astype(mx.float32) - got, x.dtype))
        return out | {_REST + name: a for name, a in rest.items()}

    def _rest(self, packed: Packed) -> Packed:
        return {n.removeprefix(_REST): a for n, a in packed.items() if n.startswith(_REST)}

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Products with the codes, and with the residuals."""
        out = self.base.scores(q, packed)
        if self.rest is None or self.spec.owns:
            return out
        return out + self.rest.scores(q, self._rest(packed))

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Sums of codes, and of residuals."""
        out = self.base.mix(w, packed)
        if self.rest is None or self.spec.owns:
            return out
        return out + self.rest.mix(w, self._rest(packed))

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        out = self.base.decode(packed, mx.float32)
        if self.rest is not None and not self.spec.owns:
            out = out + self.rest.decode(self._rest(packed), mx.float32)
        return out.astype(dtype)

    def native(self, packed: Packed, start: int, stop: int) -> NativeRun | tuple[NativeRun, ...]:
        """The codes with this layer's scales, and the residuals, which add up."""
        run = self.base.native(packed, start, stop)
        if self.rest is None or self.spec.owns:
            return run
        return run, self.rest.native(self._rest(packed), start, stop)  # type: ignore[return-value]
