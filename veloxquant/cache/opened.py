"""Keys or values whose first block is short: `[sinks][opening][body][window]`.

Sinks stand before the first block, so blocks of a fixed size would end `sinks` tokens beyond every
round number, and a prompt of round length would leave nearly a whole block exact. Here the first
block is short by the sinks, all later ones begin at multiples of their size.
"""

import mlx.core as mx

from veloxquant.cache.plans import StreamPlan
from veloxquant.cache.store import Store
from veloxquant.cache.stream import Stream
from veloxquant.quantizers.base import Codec
from veloxquant.quantizers.sizes import round_up


class Opening(Store):
    """One block of fewer tokens than it has places; copies of the last one fill it."""

    def append(self, x: mx.array) -> None:
        """Encode (B, H, n, D) as the only block; the store must be empty."""
        assert not self.length
        n = x.shape[2]
        places = round_up(n, self.codec.spec.block)
        # Copies leave the extremes of every channel as they are.
        last = [x[:, :, -1:]] * (places - n)
        super().append(mx.concatenate([x, *last], axis=2))
        self._stop = n

    def _is_whole(self, start: int, stop: int) -> bool:
        """The plan knows how many tokens there are; they cannot begin inside the block."""
        return start == 0 and stop <= self.codec.spec.block


class OpenedStream(Stream):
    """The stores of one matrix under an `OpenedPlan`."""

    def __init__(self, plan: StreamPlan, dim: int, codec: Codec | None = None) -> None:
        super().__init__(plan, dim, codec)
        self.opening = Opening(self.body.codec, plan.spec.block)

    def all_stores(self) -> tuple[Store, ...]:
        """Sinks, opening, body and window, empty or not."""
        return self.sinks, self.opening, self.body, self.window

    def coded_stores(self) -> tuple[Store, ...]:
        """Opening and body."""
        return self.opening, self.body

    def encode(self, x: mx.array) -> None:
        """Add (B, H, n, D); the first tokens of all make the opening."""
        if not self.opening.length:
            first = self.plan.spec.block - self.plan.n_sink
            self.opening.append(x[:, :, :first])
            x = x[:, :, first:]
        self.body.append(x)
