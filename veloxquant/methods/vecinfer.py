"""vecinfer: product codes after a transform that tames key outliers.

Each key channel is divided by a smooth factor and the key rotated by a Hadamard matrix; queries
take the inverse factor and the same rotation, so logits stay what they were. Keys and values are
then stored as indices into small codebooks.
Without trained codebooks (`key_codebook`, `value_codebook`, or a calibration of the model) the
tables are those of unit Gaussian vectors and every token carries its RMS, which is said once; that
makes 68 bytes of the 64 that a token has with trained ones, at the default widths.
Source: Yao et al., VecInfer, 2025, arXiv 2510.06175. Differs: the Gaussian stand-in; other head
sizes than powers of two rotate by the nearest Hadamard blocks; there is no exact window unless
`VecInferOptions(residual_length=...)` asks for one.
"""

import logging
from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx
import numpy as np

from veloxquant.allocators.vecinfer import (
    apply_dual_transform_keys,
    calibrate_smooth_factors,
    clamp_smooth_factors,
    train_codebook,
)
from veloxquant.cache.attend import attend
from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.layouts.vector import vecinfer_plan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import CodebookDimensionMismatch, QuantizerConfigError
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.hadamard import SmoothHadamard, hadamard, hadamard_matrix
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.vector import VectorSpec
from veloxquant.quantizers.vq import VectorCodec, given_table

logger = logging.getLogger(__name__)
_told: set[str] = set()


class VecInferKVCache(ComposedCache):
    """Codes of keys and values, and a scale a token on sides without a trained codebook."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> None:
        keys, values = _codecs(config, shape, context)
        plan = vecinfer_plan(
            config, key_codebook=not keys.spec.scaled, value_codebook=not values.spec.scaled
        )
        super().__init__(plan, shape, config.method, (cast(Codec, keys), cast(Codec, values)))
        self.calibrated = not (keys.spec.scaled or values.spec.scaled)
        """Whether both codebooks were trained; otherwise Gaussian ones stand in."""
        self._codebook_bytes = sum(2 * c.table.centroids.size for c in (keys, values))

    def fused_sdpa(
        self, q: mx.array, scale: float, *, causal: bool = True, sliding_window: int = 0
    ) -> mx.array:
        """Attention of untransformed queries (B, Hq, L, D) with everything held, from the codes.

        Args:
            q: queries; the newest belongs to the newest token.
            scale: factor on the scores.
            causal: hide newer tokens from each query.
            sliding_window: newest tokens that a query sees, 0 for all.

        Returns:
            (B, Hq, L, D) in the type of `q`.
        """
        keys, values = self.runs()
        length, total = q.shape[2], self.rows
        mask: mx.array | str | None = "causal" if causal and length > 1 else None
        if sliding_window > 0:
            at = mx.arange(total - length, total)[:, None]
            mask = at - mx.arange(total)[None] < sliding_window
            if causal:
                mask = mask & (at >= mx.arange(total)[None])
        _, heads, _, v_dim = self._known_shape()
        return attend(
            q, keys, values, n_kv=heads, v_dim=v_dim, scale=scale, mask=mask,
            use_kernels=self.use_kernels,
        )  # fmt: skip

    @property
    def codebook_bytes(self) -> int:
        """Bytes of both codebooks in 16 bits; shared by sequences, and by layers unless trained."""
        return self._codebook_bytes


def _codecs(
    config: KVCacheConfig, shape: LayerShape, context: LayerContext
) -> tuple[VectorCodec, VectorCodec]:
    """Codecs of keys and values, from the configuration before the calibration."""
    found: Mapping[str, Any] = context.artifacts or {}

    def given(field: str) -> Any:
        mine = getattr(config, field)
        return found.get(field) if mine is None else mine

    out = []
    for field, dim, sub, width in (
        ("key_codebook", shape.k_dim, config.key_sub_dim, config.key_codebook_bits),
        ("value_codebook", shape.v_dim, config.value_sub_dim, config.value_codebook_bits),
    ):
        if dim % sub:
            raise QuantizerConfigError(
                f"codes of {sub} channels do not divide heads of {dim}; set {field[:-9]}_sub_dim "
                f"to a divisor of {dim}"
            )
        codebook = given(field)
        table = None
        if codebook is not None:
            table = given_table(
                codebook, field, sub=sub, bits=width, heads=shape.n_kv_heads, dim=dim,
                layer=context.layer,
            )  # fmt: skip
        elif field not in _told:
            _told.add(field)
            logger.warning("vecinfer has no %s: a Gaussian one and a scale a token stand in", field)
        keys = field == "key_codebook"
        basis = None
        if keys:
            basis = _basis(given("smooth_factors"), shape, context.layer)
        spec = VectorSpec(sub, width, "hadamard" if keys else "plain", scaled=table is None)
        out.append(VectorCodec(dim, spec, table, basis))
    return out[0], out[1]


def _basis(smooth: Any, shape: LayerShape, layer: int) -> SmoothHadamard:
    """The transform of keys; smooth factors are None, (D,), (H, D) or (layers, H, D)."""
    if smooth is None:
        return hadamard(shape.k_dim)
    a = mx.array(smooth, dtype=mx.float32)
    if a.ndim == 3 and layer < a.shape[0]:
        a = a[layer]
    if a.shape not in ((shape.k_dim,), (shape.n_kv_heads, shape.k_dim)):
        raise CodebookDimensionMismatch(
            f"smooth_factors of shape {tuple(a.shape)} do not fit; give ({shape.k_dim},) or "
            f"({shape.n_kv_heads}, {shape.k_dim})"
        )
    if not (mx.isfinite(a) & (a > 0)).all().item():
        raise QuantizerConfigError("smooth_factors must be positive and finite")
    return SmoothHadamard(shape.k_dim, clamp_smooth_factors(a))


FIT_FIELDS = ("key_sub_dim", "value_sub_dim", "key_codebook_bits", "value_codebook_bits")
"""Settings that fitted arrays depend on."""
_ROWS_EACH = 8
_ROUNDS = 5
"""More rows a centroid or more rounds of k-means lower the error on other text by 4 % at most."""


def _codebook(x: mx.array, sub: int, bits: int, seed: int) -> mx.array:
    """Codebook of sub-vectors of rows (H, N, D), from as many as its size needs."""
    parts = x.reshape(-1, sub)
    wanted = max(_ROWS_EACH << bits, 1 << 14)
    if parts.shape[0] > wanted:
        chosen = np.random.default_rng(seed).choice(parts.shape[0], wanted, replace=False)
        parts = mx.take(parts, mx.array(chosen), axis=0)
    return train_codebook(parts, 1 << bits, max_iter=_ROUNDS, seed=seed)


def fit(sample: LayerSample, config: KVCacheConfig) -> dict[str, mx.array]:
    """Smooth factors (H, D) and both codebooks for one layer, from what it saw of a text."""
    smooth = clamp_smooth_factors(calibrate_smooth_factors(sample.keys.swapaxes(0, 1)))
    turned = apply_dual_transform_keys(sample.keys, smooth, hadamard_matrix(sample.shape.k_dim))
    return {
        "smooth_factors": smooth,
        "key_codebook": _codebook(
            turned, config.key_sub_dim, config.key_codebook_bits, config.seed
        ),
        "value_codebook": _codebook(
            sample.values, config.value_sub_dim, config.value_codebook_bits, config.seed
        ),
    }  # fmt: skip


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> VecInferKVCache:
    """The cache of one layer."""
    return VecInferKVCache(config, shape, context)
