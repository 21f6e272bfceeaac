"""Caches that keep rows as they came and give some of them up.

Rows go into the stores at once and attention reads them there, with mlx's own kernel: until the
first eviction the output is that of the plain cache, bit for bit. Or they are packed in a form that
codes tokens one by one, and attention reads that.
"""

from collections.abc import Sequence

import mlx.core as mx

from veloxquant.cache.attend import Fresh, Run
from veloxquant.cache.layer import LayerCache
from veloxquant.cache.plans import COMPUTE_ITEMSIZE, SCORE_BYTES
from veloxquant.cache.store import Store
from veloxquant.cache.view import AttentionCall
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.sizes import WINDOW_STEP, CodecSpec, LayerShape
from veloxquant.quantizers.specs.plain import PlainSpec


class ExactRows(LayerCache):
    """One store of exact rows for keys, one for values; subclasses decide what goes."""

    writes_through = True

    def __init__(self, shape: LayerShape, method: str) -> None:
        super().__init__()
        self.method = method
        self._dims = (shape.k_dim, shape.v_dim)
        self.key_rows = Store(codec_for(PlainSpec(), shape.k_dim), WINDOW_STEP)
        self.value_rows = Store(codec_for(PlainSpec(), shape.v_dim), WINDOW_STEP)
        self.evicted = 0

    def hold_in(self, keys: CodecSpec, values: CodecSpec) -> None:
        """Pack rows in these forms; while the cache is empty.

        New rows are then attended at full precision once, and packed when the next ones come.
        """
        assert not self.rows
        self.key_rows = Store(codec_for(keys, self._dims[0]), WINDOW_STEP)
        self.value_rows = Store(codec_for(values, self._dims[1]), WINDOW_STEP)
        self.writes_through = False

    def as_held(self, rows: mx.array, side: int) -> Run:
        """New keys (side 0) or values (1) as attention will read them once they are stored."""
        store = (self.key_rows, self.value_rows)[side]
        if self.writes_through:
            return Fresh(rows)
        coded = Store(store.codec, store.step)
        coded.append(rows)
        return coded

    def streams(self) -> tuple[Sequence[Store], Sequence[Store]]:
        """The two stores."""
        return (self.key_rows,), (self.value_rows,)

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Append rows."""
        self.key_rows.append(keys)
        self.value_rows.append(values)

    def attend(self, call: AttentionCall) -> mx.array:
        """Attention over the rows in place; in tiles where the CPU would hold too many scores.

        Raises:
            CacheStateError: when the cache moved on since the view was made.
        """
        batch, heads, length, _ = call.queries.shape
        pairs = batch * heads * length * self.rows
        on_cpu = mx.default_device() == mx.cpu
        too_wide = on_cpu and pairs * COMPUTE_ITEMSIZE > SCORE_BYTES
        if too_wide or not self.writes_through or len(self.runs()[0]) != 1:
            return super().attend(call)
        call.check(self.rows)
        if call.length == 0:
            return self.no_rows(call.queries)
        keys = self.key_rows.decode(0, self.rows, self._dtype)
        values = self.value_rows.decode(0, self.rows, self._dtype)
        out = mx.fast.scaled_dot_product_attention(
            call.queries, keys, values, scale=call.scale, mask=call.mask, sinks=call.sinks
        )
        if call.owner:
            self.observe(call.queries, call.scale, call.sinks)
        return self._settled(out)

    def drop(self, n: int) -> int:
        """Rewind rows while nothing was evicted; afterwards nothing."""
        if self.evicted:
            return 0
        self.key_rows.trim(n)
        self.value_rows.trim(n)
        return n

    def is_trimmable(self) -> bool:
        """Until the first eviction; one that is due happens now.

        Not while empty: that is when speculative decoding asks, which goes on without rewinding
        where that is refused later, to wrong tokens.
        """
        self.commit()
        # What was given up lives on until it is computed what stays.
        mx.eval(self._unevaluated)
        return self.evicted == 0 and self.offset > 0

    # ---- counters of the documents ------------------------------------------------------

    @property
    def tokens_seen(self) -> int:
        """Tokens fed, minus tokens rewound."""
        return self.offset

    @property
    def tokens_kept(self) -> int:
        """Rows held."""
        return self.rows

    @property
    def kept_bytes(self) -> int:
        """Bytes of the rows held, without growth steps."""
        keys, values = self.streams()
        return sum(s.length * s.nbytes // max(1, s.capacity) for s in (*keys, *values))

    @property
    def full_seq_bytes(self) -> int:
        """Bytes that all tokens would take in 16 bits."""
        return self.full_bytes()

    @property
    def compression_ratio(self) -> float:
        """16-bit bytes of all tokens over the bytes of the rows kept."""
        return self.full_seq_bytes / self.kept_bytes if self.kept_bytes else 1.0
