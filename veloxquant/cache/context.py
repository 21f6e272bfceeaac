"""What a method may know about the layer it builds a cache for, or fits its constants to."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from veloxquant.quantizers.sizes import LayerShape

if TYPE_CHECKING:
    import mlx.core as mx

    from veloxquant.cache.coordinators import LayerGroup
    from veloxquant.cache.layer_board import Seat
    from veloxquant.cache.residual import ResidualHook


class LayerContext(NamedTuple):
    """Place of a layer in its model.

    `rope` is the layer's position encoding if it could be found, `pool` a block pool for methods
    that draw from one, `views` whether attention will come through the hook, `artifacts` what the
    method's `fit` found for this layer in a calibration of this model, None without one, `group`
    the layers of its sequence that it codes tokens with, None for a layer by itself. `residual`
    watches the model's residual stream for methods that ask for it, None where it does not show.
    `seat` is its place among layers that were made by hand, of which none must be the next one.
    """

    layer: int = 0
    n_layers: int = 1
    seed: int = 42
    rope: Any | None = None
    pool: Any | None = None
    views: bool = False
    artifacts: Mapping[str, Any] | None = None
    group: "LayerGroup | None" = None
    residual: "ResidualHook | None" = None
    seat: "Seat | None" = None


class LayerSample(NamedTuple):
    """What one layer saw of a calibration text, as its cache sees it: keys and queries rotated.

    `keys` (H, N, k_dim), `values` (H, N, v_dim) and `queries` (R·H, N, k_dim) are fp32, of the same
    N tokens at the positions `positions` (N,) int32 of their window of text. `queries` is None
    where the model computes attention itself. `layer` counts the compressed layers.
    """

    layer: int
    n_layers: int
    shape: LayerShape
    keys: "mx.array"
    values: "mx.array"
    queries: "mx.array | None"
    positions: "mx.array"
    rope: Any | None = None
