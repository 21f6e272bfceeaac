"""Quantizer of min–max groups over a batch of vectors: groups of tokens, or groups of channels.

The cache method of this name has a format of its own, see `quantizers/affine.py`.
Source: KIVI (arXiv 2402.02750).
"""

from typing import Any, Literal

import mlx.core as mx

from veloxquant.codebooks.strategies import check_bits
from veloxquant.core.abstractions import ArtifactStore, Quantizer
from veloxquant.core.constants import DEFAULT_SEED
from veloxquant.core.context import EncodedVector
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.core.registry import QuantizerRegistry
from veloxquant.quantizers.rows import check_dim, norms, part, query, rows

_LEAST_SCALE = 1e-8


@QuantizerRegistry.register("kivi")
class KIVIQuantizer(Quantizer):
    """`b` bits a number; `norm` holds the steps of the groups and `residual_norm` their minima.

    With `axis` "channel", as for keys, a group is `group_size` consecutive vectors in one channel;
    with "token", as for values, `group_size` consecutive channels of one vector. A last group that
    is short stands for itself.
    """

    def __init__(
        self,
        d: int,
        b: int = 2,
        group_size: int = 32,
        axis: Literal["channel", "token"] = "channel",
        m: int | None = None,
        seed: int = DEFAULT_SEED,
        store: ArtifactStore | None = None,
        **kwargs: Any,
    ) -> None:
        del m, seed, store, kwargs  # one signature for all quantizers
        check_dim(d)
        check_bits(b)
        if group_size < 1:
            raise QuantizerConfigError(f"group_size={group_size!r} must be at least 1")
        if axis not in ("channel", "token"):
            raise QuantizerConfigError(f"axis={axis!r}; choose 'channel' or 'token'")
        self.d, self.b, self.group_size, self.axis = d, b, group_size, axis

    def _grouped(self, x: mx.array) -> mx.array:
        """Rows (n, k) as (n / group, group, k), the last group filled up with its last row."""
        missing = -x.shape[0] % self.group_size
        if missing:
            x = mx.concatenate([x, mx.repeat(x[-1:], missing, axis=0)], axis=0)
        return x.reshape(x.shape[0] // self.group_size, self.group_size, x.shape[1])

    def _spread(self, per_group: mx.array, n: int) -> mx.array:
        return mx.repeat(per_group, self.group_size, axis=0)[:n]

    def encode(self, x: Any) -> EncodedVector:
        """Indices (batch, d) uint8, and a step and a minimum for each group.

        Raises:
            ValueError: for another shape, or numbers that are not finite.
        """
        x, dtype = rows(x, self.d)
        if not mx.isfinite(x).all().item():
            raise ValueError("vectors must be finite: one NaN or infinity would take its group")
        lines = x if self.axis == "channel" else x.T
        if x.shape[0] == 0:
            groups = 0 if self.axis == "channel" else -(-self.d // self.group_size)
            width = self.d if self.axis == "channel" else 0
            scale = low = mx.zeros((groups, width), dtype=dtype)
        else:
            grouped = self._grouped(lines)
            low = grouped.min(axis=1).astype(dtype)
            top = (1 << self.b) - 1
            # Halves, so that the range of huge numbers stays finite.
            span = grouped.max(axis=1) / 2 - low.astype(mx.float32) / 2
            scale = (mx.maximum(span / top * 2, _LEAST_SCALE)).astype(dtype)
        indices = self._codes(lines, scale, low)
        if self.axis == "token":
            indices = indices.T
        return EncodedVector(
            "kivi", x.shape[0], self.d, indices=indices, norm=scale, residual_norm=low
        )

    def _codes(self, lines: mx.array, scale: mx.array, low: mx.array) -> mx.array:
        """Codes by the steps as they are stored."""
        n = lines.shape[0]
        step = self._spread(scale.astype(mx.float32), n)
        offset = lines - self._spread(low.astype(mx.float32), n)
        codes = mx.round(mx.where(step > 0, offset / mx.maximum(step, 1e-30), 0.0))
        return mx.clip(codes, 0, (1 << self.b) - 1).astype(mx.uint8)

    def decode(self, ev: EncodedVector) -> mx.array:
        """Vectors (batch, d) in the type they came in."""
        return self._decoded(ev).astype(part(ev, "norm").dtype)

    def _decoded(self, ev: EncodedVector) -> mx.array:
        codes = part(ev, "indices").astype(mx.float32)
        lines = codes if self.axis == "channel" else codes.T
        n = lines.shape[0]
        step, low = (self._spread(norms(ev, f), n) for f in ("norm", "residual_norm"))
        whole = lines * step + low
        return whole if self.axis == "channel" else whole.T

    def estimate_inner_product(self, q: Any, ev: EncodedVector) -> mx.array:
        """Inner products (batch,) with the decoded vectors."""
        q, dtype = query(q, self.d)
        return (self._decoded(ev) @ q).astype(dtype)
