"""Keys and values under constants of a calibration: fitting them, and the codecs that use them."""

import mlx.core as mx
import numpy as np

from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.plans import LayerPlan, StreamPlan
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.fitted import fit_side, given_codec
from veloxquant.quantizers.sizes import LayerShape


def fit_sides(plan: LayerPlan, sample: LayerSample) -> dict[str, mx.array]:
    """Constants of both codecs of a plan, from the tokens of a sample that are no sinks.

    Raises:
        QuantizerConfigError: when the sample has fewer tokens than a codec is fitted to.
    """
    out: dict[str, mx.array] = {}
    for side, stream, rows in (
        ("key", plan.keys, sample.keys),
        ("value", plan.values, sample.values),
    ):
        out |= fit_side(stream.spec, side, mx.take(rows, kept_tokens(stream, sample), axis=1))
    return out


def kept_tokens(stream: StreamPlan, sample: LayerSample) -> mx.array:
    """Numbers (n,) of the tokens of a sample that are no sinks of a stream.

    Raises:
        QuantizerConfigError: when there are fewer than the stream's codec is fitted to.
    """
    kept = np.flatnonzero(np.array(sample.positions) >= stream.n_sink)
    if len(kept) < stream.spec.fit_tokens:
        raise QuantizerConfigError(
            f"a text of {len(kept)} tokens is too short: {stream.spec.fit_tokens} are needed"
        )
    return mx.array(kept)


def given_codecs(
    plan: LayerPlan, shape: LayerShape, context: LayerContext
) -> tuple[Codec | None, Codec | None]:
    """Codecs of keys and values with the calibrated constants of their layer; None without."""
    heads, found = shape.n_kv_heads, context.artifacts
    return (
        given_codec(plan.keys.spec, shape.k_dim, heads, "key", found),
        given_codec(plan.values.spec, shape.v_dim, heads, "value", found),
    )
