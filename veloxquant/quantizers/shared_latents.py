"""Latents of several layers' rows side by side: one code a token, a part of the basis a layer.

Neighbouring layers see the same directions among tokens, so the long factor, the latents, is stored
once. Each layer's rows are scaled to equal energy first, or the loudest layer would own the basis.
Source: xKV (arXiv 2503.18893). Differs: every KV head by itself instead of all heads of a layer in
one row, so a basis is small and fitted within a moment.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from veloxquant.kernels.native import NativeRun
from veloxquant.quantizers.base import Packed, saturated
from veloxquant.quantizers.latent import project
from veloxquant.quantizers.latent_rows import LatentCodec
from veloxquant.quantizers.specs.shared import SharedLatentsSpec
from veloxquant.quantizers.together import TogetherCodec


class SharedLatentsCodec(TogetherCodec):
    """Arrays of `LatentCodec` for the joint rows, numbered; `basis` (D, r) and `unit` (1, 1).

    `basis` turns latents into rows; `unit` is the energy of this layer's first rows, by which
    projection divides. `moments` says what joint rows to expect.
    """

    borrowed = ("0.", "1.")

    def __init__(
        self,
        dim: int,
        spec: SharedLatentsSpec,
        moments: Callable[[mx.array], np.ndarray] | None = None,
    ) -> None:
        self.dim, self.spec = dim, spec
        self.inner = LatentCodec(spec.size * dim, spec.latents, moments)
        self.axes = dict(self.inner.axes) if spec.owns else {}

    def fit_together(self, rows: Sequence[mx.array]) -> list[Packed]:
        """Each layer's part of the joint basis, with its scale folded in."""
        units = [_energy(x) for x in rows]
        joint = [x.astype(mx.float32) / unit for x, unit in zip(rows, units, strict=True)]
        basis = self.inner.fit(mx.concatenate(joint, axis=-1))["basis"]
        out, dtype = [], rows[0].dtype
        for i, unit in enumerate(units):
            part = basis[:, :, i * self.dim : (i + 1) * self.dim]
            out.append({"basis": (part * unit).astype(dtype), "unit": unit})
        return out

    def encode_together(self, rows: Sequence[mx.array], fitted: Sequence[Packed]) -> list[Packed]:
        """Codes of the joint rows for the first layer; nothing but constants for the others."""
        latents: mx.array | None = None
        for x, own in zip(rows, fitted, strict=True):
            part = project(x, own["basis"].astype(mx.float32) / mx.square(own["unit"]))
            latents = part if latents is None else latents + part
        assert latents is not None
        return [self.inner.pack(saturated(latents, rows[0].dtype)), *({} for _ in rows[1:])]

    def decode(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """Rows (B, H, T, D)."""
        return self.inner.decode(packed, dtype)

    def scores(self, q: mx.array, packed: Packed) -> mx.array:
        """Products of projected queries with latents."""
        return self.inner.scores(q, packed)

    def mix(self, w: mx.array, packed: Packed) -> mx.array:
        """Sums of latents as sums of this layer's rows."""
        return self.inner.mix(w, packed)

    def native(self, packed: Packed, start: int, stop: int) -> tuple[NativeRun, ...] | None:
        """The latents in this layer's directions."""
        return self.inner.native(packed, start, stop)


def _energy(x: mx.array) -> mx.array:
    """Root mean square of rows (B, H, n, D) as (B, H, 1, 1) fp32, 1 where there are only zeros."""
    x = x.astype(mx.float32)
    peak = mx.abs(x).max(axis=(-1, -2), keepdims=True)
    near = x / mx.where(peak > 0, peak, 1.0)
    unit = peak * mx.sqrt(mx.square(near).mean(axis=(-1, -2), keepdims=True))
    return mx.where(peak > 0, unit, 1.0)
