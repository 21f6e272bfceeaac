"""What a method may know about the layer it builds a cache for."""

from typing import Any, NamedTuple


class LayerContext(NamedTuple):
    """Place of a layer in its model.

    `rope` is the layer's position encoding if it could be found, `pool` a block pool for methods
    that draw from one, `views` whether attention will come through the hook.
    """

    layer: int = 0
    n_layers: int = 1
    seed: int = 42
    rope: Any | None = None
    pool: Any | None = None
    views: bool = False
