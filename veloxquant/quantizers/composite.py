"""Two quantizers over one vector: outlier channels to one, the others to the other."""

from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.core.abstractions import Quantizer
from veloxquant.core.context import EncodedVector
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.rows import part, query


class CompositeQuantizer(Quantizer):
    """Channels `outlier_idx` of `total_dim` to `outlier_quantizer`, the rest to the other."""

    def __init__(
        self,
        outlier_quantizer: Quantizer,
        inlier_quantizer: Quantizer,
        outlier_idx: np.ndarray,
        total_dim: int,
    ) -> None:
        index = np.asarray(outlier_idx).reshape(-1)
        chosen = np.unique(index)
        legal = len(index) and np.issubdtype(index.dtype, np.integer)
        if not legal or len(chosen) != len(index) or chosen[0] < 0 or chosen[-1] >= total_dim:
            raise QuantizerConfigError(
                f"outlier_idx {index.tolist()} must be different channels from 0 to {total_dim - 1}"
            )
        if len(index) == total_dim:
            raise QuantizerConfigError("every channel is an outlier; use one quantizer alone")
        rest = np.setdiff1d(np.arange(total_dim), index)
        for quantizer, n, name in (
            (outlier_quantizer, len(index), "outlier_quantizer"),
            (inlier_quantizer, len(rest), "inlier_quantizer"),
        ):
            if getattr(quantizer, "d", n) != n:
                raise QuantizerConfigError(
                    f"{name} takes vectors of length {quantizer.d}, its channels are {n}"  # pyright: ignore[reportAttributeAccessIssue]
                )
        self.outlier_quantizer, self.inlier_quantizer = outlier_quantizer, inlier_quantizer
        self.d = total_dim
        self.outlier_idx = index.astype(np.int32)
        self._outliers, self._inliers = mx.array(self.outlier_idx), mx.array(rest.astype(np.int32))
        back = np.argsort(np.concatenate([index, rest]), kind="stable")
        self._back = mx.array(back.astype(np.int32))

    def encode(self, x: Any) -> EncodedVector:
        """Both parts of vectors (batch, d)."""
        x = x if isinstance(x, mx.array) else mx.array(x)
        if x.ndim != 2 or x.shape[1] != self.d:
            raise ValueError(f"vectors of shape {x.shape}; this quantizer takes (batch, {self.d})")
        return EncodedVector(
            "composite", x.shape[0], self.d, outlier_idx=self.outlier_idx,
            outlier_encoded=self.outlier_quantizer.encode(mx.take(x, self._outliers, axis=1)),
            inlier_encoded=self.inlier_quantizer.encode(mx.take(x, self._inliers, axis=1)),
        )  # fmt: skip

    def decode(self, ev: EncodedVector) -> mx.array:
        """Vectors (batch, d), channels in their own places."""
        outliers = self.outlier_quantizer.decode(_encoded(ev, "outlier_encoded"))
        inliers = self.inlier_quantizer.decode(_encoded(ev, "inlier_encoded"))
        return mx.take(mx.concatenate([outliers, inliers], axis=1), self._back, axis=1)

    def estimate_inner_product(self, q: Any, ev: EncodedVector) -> mx.array:
        """Sum of the estimates of both parts, (batch,)."""
        vector, dtype = query(q, self.d)
        pairs = (
            (self.outlier_quantizer, self._outliers, "outlier_encoded"),
            (self.inlier_quantizer, self._inliers, "inlier_encoded"),
        )
        total = mx.zeros((ev.batch_size,))
        for quantizer, channels, field in pairs:
            inner = mx.take(vector, channels)
            total = total + quantizer.estimate_inner_product(inner, _encoded(ev, field))
        return total.astype(dtype)


def _encoded(ev: EncodedVector, field: str) -> EncodedVector:
    value: Any = part(ev, field)
    return value
