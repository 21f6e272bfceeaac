"""Order of channels by variance, and weights that follow it."""

import mlx.core as mx

from veloxquant.quantizers.prefix import variance_order


def amc_calibrate_channel_order(calib_activations: mx.array) -> mx.array:
    """Channels of (n, D) by falling variance, the lower of equal ones first: (D,) int32."""
    return variance_order(calib_activations, pairs=False)[0].astype(mx.int32)


def amc_permute_weights(weight: mx.array, perm: mx.array, axis: int = -1) -> mx.array:
    """The weight with one axis in the order of `perm`."""
    return mx.take(weight, perm, axis=axis)
