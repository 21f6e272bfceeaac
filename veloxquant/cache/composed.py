"""The cache of every method that keeps all tokens: two streams that follow a plan."""

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx

from veloxquant.cache.layer import LayerCache
from veloxquant.cache.plans import LayerPlan
from veloxquant.cache.store import Store
from veloxquant.cache.stream import Stream
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.quantizers.specs.plain import PlainSpec


class ComposedCache(LayerCache):
    """Keys and values in `[sinks][body][window]` each, by the plan of the method.

    `codecs` replaces those that the plan names, for constants of this layer alone.
    """

    stream_type: ClassVar[type[Stream]] = Stream

    def __init__(
        self,
        plan: LayerPlan,
        shape: LayerShape,
        method: str,
        codecs: tuple[Codec | None, Codec | None] = (None, None),
    ) -> None:
        super().__init__()
        self.method = method
        self.plan = plan
        self.keys_stream = self.stream_type(plan.keys, shape.k_dim, codecs[0])
        self.values_stream = self.stream_type(plan.values, shape.v_dim, codecs[1])

    def streams(self) -> tuple[Sequence[Store], Sequence[Store]]:
        """Sinks, body and window of keys and of values."""
        return self.keys_stream.all_stores(), self.values_stream.all_stores()

    def fits_plan(self, offset: int, held: list[int]) -> bool:
        """Sinks, body and window must be those of the plan at this length."""
        rows = (*self.plan.keys.rows(offset), *self.plan.values.rows(offset))
        return tuple(held) == rows

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Append to both streams."""
        self.keys_stream.append(keys)
        self.values_stream.append(values)

    def drop(self, n: int) -> int:
        """Rewind both streams; tokens coded in blocks come back as the codec decodes them."""
        if n:
            self.keys_stream.trim(n)
            self.values_stream.trim(n)
        return n

    # ---- counters of the documents ------------------------------------------------------

    def _side_bytes(self, stream: Stream, *, packed: bool) -> int:
        coded = () if isinstance(stream.plan.spec, PlainSpec) else stream.coded_stores()
        stores = coded if packed else [s for s in stream.all_stores() if s not in coded]
        return sum(store.nbytes for store in stores)

    @property
    def compressed_key_bytes(self) -> int:
        """Bytes of packed keys."""
        return self._side_bytes(self.keys_stream, packed=True)

    @property
    def compressed_value_bytes(self) -> int:
        """Bytes of packed values."""
        return self._side_bytes(self.values_stream, packed=True)

    @property
    def residual_fp16_bytes(self) -> int:
        """Bytes of exact rows: sinks, windows and the pending step."""
        pending = sum(a.nbytes for a in self.pending) if self.pending is not None else 0
        return pending + sum(
            self._side_bytes(s, packed=False) for s in (self.keys_stream, self.values_stream)
        )

    @property
    def fp16_key_bytes(self) -> int:
        """Bytes that the keys of all tokens would take in 16 bits."""
        if self._shape is None:
            return 0
        batch, heads, k_dim, _ = self._shape
        return 2 * batch * heads * self.offset * k_dim

    @property
    def fp16_value_bytes(self) -> int:
        """Bytes that the values of all tokens would take in 16 bits."""
        return self.full_bytes() - self.fp16_key_bytes

    @property
    def effective_compression_ratio(self) -> float:
        """16-bit bytes over bytes held; 1.0 while empty."""
        return self.full_bytes() / self.nbytes if self.offset else 1.0

    @property
    def assigned_avg_bits(self) -> float:
        """Mean bits per element really held, scales and windows included."""
        return 16 / self.effective_compression_ratio
