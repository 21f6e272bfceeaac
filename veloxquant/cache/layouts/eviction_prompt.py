"""Sizes of the methods that compress a prompt once, when it is complete.

Rows of decoded tokens are not counted.
"""

from veloxquant.cache.layouts.base import SizeOf
from veloxquant.cache.layouts.eviction import Extra, kept_held
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import Held, LayerShape

PROMPT_WINDOW = 32
"""Newest rows whose queries choose, and which stay, where no setting says how many."""


def pyramidkv_held(config: KVCacheConfig, shape: LayerShape, tokens: int) -> Held:
    """The mean over layers; between the least and the largest budget a little too much."""
    rows = config.pyramid_resolved_budget or config.pyramid_budget
    return kept_held(shape, tokens, min(tokens, rows), Extra())


HELD: dict[str, SizeOf] = {
    "pyramidkv": pyramidkv_held,
}
