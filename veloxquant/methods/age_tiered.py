"""age_tiered: 8 bits for recent tokens, 4 for older ones, 2 for the oldest.

Recent tokens are attended most and are few; old tokens are many. Keys lie per channel in groups of
tokens, values per token in groups of channels. The grids of the three widths lie in one another, so
a block is demoted by an integer division of its codes: nothing is decoded, and a token that was
demoted twice has the codes that it would have had at once. The first tokens are the oldest and get
the fewest bits: where a model leans on them, kivi_sink keeps more of it.
Source: none under this name; a design of this library.
"""

from veloxquant.cache.composed import ComposedCache
from veloxquant.cache.context import LayerContext
from veloxquant.cache.layouts.tiered import age_tiered_plan
from veloxquant.cache.tiers import AgeStream
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape


class AgeTieredKVCache(ComposedCache):
    """Keys and values in three tiers of age behind an exact, unfinished block."""

    stream_type = AgeStream

    @property
    def age_tiered_bytes(self) -> int:
        """Bytes held, the exact block and growth steps included."""
        return self.nbytes

    @property
    def full_seq_bytes(self) -> int:
        """Bytes that all tokens would take in 16 bits."""
        return self.full_bytes()

    @property
    def compression_ratio(self) -> float:
        """16-bit bytes of all tokens over the bytes held; 1.0 while empty."""
        return self.effective_compression_ratio

    @property
    def tokens_seen(self) -> int:
        """Tokens fed, minus tokens rewound."""
        return self.offset

    @property
    def tokens_kept(self) -> int:
        """Tokens held: all of them."""
        return self.rows

    @property
    def tokens_old(self) -> int:
        """Tokens in the oldest tier."""
        return self.keys_stream.all_stores()[0].length

    @property
    def tokens_mid(self) -> int:
        """Tokens in the middle tier."""
        return self.keys_stream.all_stores()[1].length

    @property
    def tokens_recent(self) -> int:
        """Tokens in the youngest tier and those that still wait for their block."""
        return self.rows - self.tokens_mid - self.tokens_old


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> AgeTieredKVCache:
    """The cache of one layer."""
    return AgeTieredKVCache(age_tiered_plan(config), shape, config.method)
